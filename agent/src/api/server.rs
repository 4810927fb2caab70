//! The socket and its connections.

use std::{
    convert::Infallible,
    fs, io,
    os::unix::{
        fs::{FileTypeExt as _, PermissionsExt as _},
        net::UnixStream as StdUnixStream,
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::{body::Body, http::Request};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::Semaphore,
};
use tower_service::Service as _;

use super::{
    peer::{Access, Peer, group_id},
    routes::{self, Api},
};

/// Connections of peers that are not root; root is never locked out by readers.
const MAX_READERS: usize = 128;
/// A request's head must be complete after this.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Why there is no socket. The agent goes on without one only if its caller says so; gates are not concerned.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("another agent answers at {path}. Stop it first (`systemctl stop portcullis`): one agent per host")]
    InUse { path: PathBuf },
    #[error("{path} is in the way: it is not a socket. Move it, or set `socket` in [agent]")]
    InTheWay { path: PathBuf },
    #[error("cannot {operation} {path}: {source}. Check that its folder exists and that the agent runs as root")]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
}

/// The listening socket. The file is removed when this is dropped.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
    group: Option<u32>,
}

impl Server {
    /// Listens at `path`, mode 0660 and of `group` if that exists. What a dead agent left there is replaced; a socket
    /// that answers is refused. Needs a tokio runtime.
    pub fn bind(path: &Path, group: &str) -> Result<Self, ServerError> {
        let io = |operation| move |source| ServerError::Io { operation, path: path.to_owned(), source };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(io("make the folder of"))?;
        }
        remove_stale(path)?;
        let group = group_id(group).map_err(io("look up the group of"))?;
        let listener = UnixListener::bind(path).map_err(io("listen at"))?;
        // Between bind and here the file has the process's default mode; the credentials of each peer are checked in
        // any case, and the mode only spares strangers the trouble of connecting.
        fs::set_permissions(path, fs::Permissions::from_mode(0o660)).map_err(io("set the mode of"))?;
        std::os::unix::fs::chown(path, None, group).map_err(io("set the group of"))?;
        Ok(Self { listener, path: path.to_owned(), group })
    }

    /// Serves until dropped.
    pub async fn serve(self, api: Api) {
        let router = routes::router(api);
        let readers = Arc::new(Semaphore::new(MAX_READERS));
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of descriptors or memory: pass on the chance to recover instead of spinning.
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let peer = match Peer::of(&stream) {
                Ok(peer) => peer,
                Err(error) => {
                    tracing::warn!(%error, "a connection without credentials was closed");
                    continue;
                }
            };
            let access = peer.access(self.group);
            let permit = match access {
                Access::Change => None,
                Access::Read | Access::None => match Arc::clone(&readers).try_acquire_owned() {
                    Ok(permit) => Some(permit),
                    Err(_) => {
                        tracing::warn!(%peer, "closed a connection: {MAX_READERS} readers are connected already");
                        continue;
                    }
                },
            };
            let router = router.clone();
            tokio::spawn(async move {
                connection(stream, router, peer, access).await;
                drop(permit);
            });
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // An agent started since then has a socket of its own at this path only after it found ours dead.
        _ = fs::remove_file(&self.path);
    }
}

async fn connection(stream: UnixStream, router: axum::Router, peer: Peer, access: Access) {
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert((peer.clone(), access));
        let mut router = router.clone();
        async move {
            let response: Result<_, Infallible> = router.call(request.map(Body::new)).await;
            response
        }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = served.await {
        tracing::debug!(%error, "a connection ended early");
    }
}

fn remove_stale(path: &Path) -> Result<(), ServerError> {
    let io = |operation| move |source| ServerError::Io { operation, path: path.to_owned(), source };
    let file = match fs::symlink_metadata(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io("look at")(error)),
    };
    if !file.file_type().is_socket() {
        return Err(ServerError::InTheWay { path: path.to_owned() });
    }
    match StdUnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(io("remove")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io("try to connect to")(error)),
        Ok(_) => Err(ServerError::InUse { path: path.to_owned() }),
    }
}
