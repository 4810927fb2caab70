//! The other end of the socket, for the subcommands.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Method, Request, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1,
    header,
};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{net::UnixStream, time::timeout};

use super::types::{
    AcquireRequest, Coverage, ErrorAnswer, ErrorBody, Health, HoldRequest, LeaseGranted, LeaseReleased, MarkRequest,
    Reloaded, RenewRequest, ServiceList, ServiceStatus,
};

/// The largest answer that is read: the status of every service that fits into the maps.
const MAX_ANSWER: usize = 16 << 20;
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

/// Why there is no answer, or a refusal.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("no agent is running: {socket} {}. Start it with `systemctl start portcullis` or `portcullis agent`", match source.kind() { io::ErrorKind::NotFound => "does not exist", _ => "does not answer" })]
    NoAgent { socket: PathBuf, source: io::Error },
    #[error(
        "permission denied at {socket}. Run this as root, or to read only: join the socket's group and log in again"
    )]
    Permission { socket: PathBuf, source: io::Error },
    #[error("cannot connect to {socket}: {source}. Name the agent's socket with --socket")]
    Connect { socket: PathBuf, source: io::Error },
    #[error("the agent at {socket} did not answer within {} ms. Look at its log (`journalctl -u portcullis`)", after.as_millis())]
    Timeout { socket: PathBuf, after: Duration },
    #[error(
        "the connection to the agent at {socket} broke: {source}. Ask again; if it stays so, look at the agent's log"
    )]
    Broken { socket: PathBuf, source: hyper::Error },
    #[error(
        "what answers at {socket} does not speak as this version does ({detail}). Use the agent's own version of this command"
    )]
    Foreign { socket: PathBuf, detail: String },
    #[error("{}. Hint: {}", body.message, body.hint)]
    Refused { status: StatusCode, body: ErrorBody },
}

impl ClientError {
    /// The refusal's code, if the agent answered with one.
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Refused { body, .. } => Some(&body.code),
            Self::NoAgent { .. }
            | Self::Permission { .. }
            | Self::Connect { .. }
            | Self::Timeout { .. }
            | Self::Broken { .. }
            | Self::Foreign { .. } => None,
        }
    }

    /// The same request may succeed a little later: the agent restarts, or is busy.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::NoAgent { .. } | Self::Timeout { .. } | Self::Broken { .. } | Self::Connect { .. } => true,
            Self::Refused { status, .. } => *status == StatusCode::SERVICE_UNAVAILABLE,
            Self::Permission { .. } | Self::Foreign { .. } => false,
        }
    }
}

/// Speaks to one agent; a connection per request, so that a restarted agent is found without further ado.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    timeout: Duration,
}

impl Client {
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), timeout: DEFAULT_TIMEOUT }
    }

    /// The same with another limit for a whole request. Default 5 s.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { socket: self.socket.clone(), timeout }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub async fn services(&self) -> Result<ServiceList, ClientError> {
        self.get("/v1/services").await
    }

    pub async fn service(&self, name: &str) -> Result<ServiceStatus, ClientError> {
        self.get(&format!("/v1/services/{}", encode(name))).await
    }

    pub async fn health(&self) -> Result<Health, ClientError> {
        self.get("/v1/health").await
    }

    pub async fn coverage(&self) -> Result<Coverage, ClientError> {
        self.get("/v1/coverage").await
    }

    pub async fn fence(&self, name: &str, request: &HoldRequest) -> Result<ServiceStatus, ClientError> {
        self.send(Method::POST, &format!("/v1/services/{}/fence", encode(name)), request).await
    }

    pub async fn unfence(&self, name: &str, request: &HoldRequest) -> Result<ServiceStatus, ClientError> {
        self.send(Method::POST, &format!("/v1/services/{}/unfence", encode(name)), request).await
    }

    pub async fn reset_mark(&self, name: &str, request: &MarkRequest) -> Result<ServiceStatus, ClientError> {
        self.send(Method::PUT, &format!("/v1/services/{}/mark", encode(name)), request).await
    }

    pub async fn acquire(&self, name: &str, request: &AcquireRequest) -> Result<LeaseGranted, ClientError> {
        self.send(Method::POST, &format!("/v1/services/{}/lease", encode(name)), request).await
    }

    pub async fn renew(&self, name: &str, token: u64) -> Result<LeaseGranted, ClientError> {
        self.send(Method::PUT, &format!("/v1/services/{}/lease", encode(name)), &RenewRequest { token }).await
    }

    pub async fn release(&self, name: &str, token: u64) -> Result<LeaseReleased, ClientError> {
        self.send_bytes(Method::DELETE, &format!("/v1/services/{}/lease?token={token}", encode(name)), Bytes::new())
            .await
    }

    pub async fn reload(&self) -> Result<Reloaded, ClientError> {
        self.send_bytes(Method::POST, "/v1/reload", Bytes::new()).await
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.send_bytes(Method::GET, path, Bytes::new()).await
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        request: &impl Serialize,
    ) -> Result<T, ClientError> {
        let body = serde_json::to_vec(request).map_err(|error| self.foreign(error))?;
        self.send_bytes(method, path, body.into()).await
    }

    async fn send_bytes<T: DeserializeOwned>(&self, method: Method, path: &str, body: Bytes) -> Result<T, ClientError> {
        let (status, bytes) = timeout(self.timeout, self.exchange(method, path, body))
            .await
            .map_err(|_| ClientError::Timeout { socket: self.socket.clone(), after: self.timeout })??;
        if status.is_success() {
            return serde_json::from_slice(&bytes).map_err(|error| self.foreign(error));
        }
        let ErrorAnswer { error } = serde_json::from_slice(&bytes).map_err(|error| self.foreign(error))?;
        Err(ClientError::Refused { status, body: error })
    }

    /// One request on one connection: status and whole body of its answer.
    pub async fn exchange(&self, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, Bytes), ClientError> {
        let broken = |source| ClientError::Broken { socket: self.socket.clone(), source };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "localhost")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| self.foreign(error))?;
        let stream = UnixStream::connect(&self.socket).await.map_err(|source| self.not_connected(source))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        let answer = async {
            let response = sender.send_request(request).await.map_err(broken)?;
            let status = response.status();
            let body: Limited<Incoming> = Limited::new(response.into_body(), MAX_ANSWER);
            let bytes = body.collect().await.map_err(|error| self.foreign(error))?.to_bytes();
            Ok((status, bytes))
        };
        tokio::pin!(connection, answer);
        tokio::select! {
            biased;
            answer = &mut answer => answer,
            ended = &mut connection => {
                ended.map_err(broken)?;
                answer.await
            }
        }
    }

    fn not_connected(&self, source: io::Error) -> ClientError {
        let socket = self.socket.clone();
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ClientError::NoAgent { socket, source },
            io::ErrorKind::PermissionDenied => ClientError::Permission { socket, source },
            _ => ClientError::Connect { socket, source },
        }
    }

    fn foreign(&self, detail: impl ToString) -> ClientError {
        ClientError::Foreign { socket: self.socket.clone(), detail: detail.to_string() }
    }
}

/// A name as one segment of a path: whatever is not plainly harmless is percent-encoded.
fn encode(name: &str) -> String {
    name.bytes().fold(String::new(), |mut encoded, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
        encoded
    })
}
