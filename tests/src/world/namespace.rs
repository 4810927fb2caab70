//! A network namespace, kept by a descriptor: it dies with the test process, however that ends.

use std::{
    fs::File,
    io,
    net::{SocketAddr, TcpListener},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        linux::fs::MetadataExt,
        unix::process::CommandExt,
    },
    panic,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

pub use std::process::Command;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use super::{Cgroup, Process, binary};
use crate::clock;

/// How long a process may take to make a listening socket.
const LISTENING: Duration = Duration::from_secs(10);

/// A network namespace of a world. Clones name the same namespace.
#[derive(Clone, Debug)]
pub struct Namespace {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: String,
    file: File,
    cgroup: Cgroup,
    /// The world's folder, for the logs of what runs inside.
    folder: PathBuf,
}

impl Namespace {
    pub(super) fn new(name: &str, folder: &Path, cgroup: Cgroup) -> Self {
        // The thread ends right away; the descriptor keeps what it leaves.
        let file = thread::scope(|scope| {
            scope
                .spawn(|| {
                    // SAFETY: only the network namespace is unshared: descriptors and memory stay as they are.
                    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
                    File::open("/proc/thread-self/ns/net")
                })
                .join()
                .unwrap_or_else(|payload| panic::resume_unwind(payload))
        })
        .unwrap_or_else(|e| panic!("make the network namespace {name}: {e}"));
        let namespace =
            Self { inner: Arc::new(Inner { name: name.to_owned(), file, cgroup, folder: folder.to_owned() }) };
        // Addresses are usable at once, and the links are silent but for the test's own traffic.
        for key in ["accept_dad", "accept_ra", "router_solicitations"] {
            namespace.sysctl(&format!("net.ipv6.conf.default.{key}"), "0");
            namespace.sysctl(&format!("net.ipv6.conf.all.{key}"), "0");
        }
        namespace.ip("link set lo up");
        namespace
    }

    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// A path by which others enter: `nsenter --net=PATH`, `ip link ... netns PATH`. Valid while the test process lives.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.inner.file.as_raw_fd()))
    }

    /// The kernel's number of the namespace, as in `net:[4026531840]`.
    pub fn inode(&self) -> u64 {
        self.inner.file.metadata().unwrap_or_else(|e| panic!("stat the namespace {}: {e}", self.name())).st_ino()
    }

    /// Moves the calling thread into the namespace, for the rest of its life.
    pub fn enter(&self) {
        enter(self.inner.file.as_fd()).unwrap_or_else(|e| panic!("enter the namespace {}: {e}", self.name()));
    }

    /// Runs `work` in a thread inside the namespace and waits for it. Sockets made there belong to the namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                self.enter();
                work()
            });
            inside.join().unwrap_or_else(|payload| panic::resume_unwind(payload))
        })
    }

    /// A command that will run inside the namespace. It joins no cgroup unless it is started by [`Namespace::spawn`].
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        let inner = Arc::clone(&self.inner);
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
        unsafe { command.pre_exec(move || enter(inner.file.as_fd())) };
        command
    }

    /// The cgroup of what [`Namespace::spawn`] starts: the world's clean-up finds it there, whatever became of its parent.
    pub fn cgroup(&self) -> &Cgroup {
        &self.inner.cgroup
    }

    /// Starts a command; its output goes to a log that is shown when the test fails.
    #[track_caller]
    pub fn spawn(&self, name: &str, command: &mut Command) -> Process {
        self.spawn_in(&self.inner.cgroup, name, command)
    }

    /// Starts a command in `cgroup`, a child of [`Namespace::cgroup`].
    #[track_caller]
    pub fn spawn_in(&self, cgroup: &Cgroup, name: &str, command: &mut Command) -> Process {
        join_cgroup(command, cgroup);
        Process::spawn(name, command, &self.inner.folder)
    }

    /// A listening socket that belongs to the namespace's cgroup, as everything on a host belongs to its root cgroup, and so
    /// do the connections that it accepts. A process in that cgroup makes it and lends it to us: this one is in another.
    ///
    /// # Errors
    /// The address cannot be bound; the message is the process's own.
    pub fn listen(&self, at: SocketAddr) -> io::Result<TcpListener> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let name = format!("{}-listener-{}", self.name(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let mut command = self.command(binary("testserver"));
        let mut lender = self.spawn(&name, command.arg("--listener").arg(at.to_string()));
        let number = |lender: &Process| lender.log().strip_suffix('\n').and_then(|line| line.parse().ok());
        let made = clock::wait_until(LISTENING, || number(&lender).is_some() || lender.ended().is_some());
        match number(&lender).filter(|_| made) {
            Some(number) => Ok(TcpListener::from(lender.borrow_descriptor(number)?)),
            None => Err(io::Error::other(lender.log())),
        }
    }

    /// Runs a command inside and returns its standard output; panics with its standard error if it fails.
    #[track_caller]
    pub fn output(&self, program: &str, arguments: &[&str]) -> String {
        finish(self.command(program).args(arguments).stdin(Stdio::null()).output(), || {
            format!("{}: {program} {}", self.name(), arguments.join(" "))
        })
    }

    /// Runs `ip` with arguments separated by spaces.
    #[track_caller]
    pub fn ip(&self, arguments: &str) -> String {
        self.output("ip", &arguments.split_whitespace().collect::<Vec<_>>())
    }

    /// Sets a network setting, such as `net.ipv4.ip_forward`, inside the namespace.
    #[track_caller]
    pub fn sysctl(&self, key: &str, value: &str) {
        let path = format!("/proc/sys/{}", key.replace('.', "/"));
        // Which namespace's setting a path means is decided by the thread that opens it.
        self.run(|| std::fs::write(&path, value))
            .unwrap_or_else(|e| panic!("{}: set {key} to {value}: {e}", self.name()));
    }
}

/// Puts a command that has not been started into a cgroup.
pub(super) fn join_cgroup(command: &mut Command, cgroup: &Cgroup) {
    let procs = cgroup.open_procs();
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            // "0" is whoever writes.
            rustix::io::write(&procs, b"0")?;
            Ok(())
        })
    };
}

/// The standard output of a command that must succeed.
#[track_caller]
pub(super) fn finish(output: io::Result<Output>, what: impl Fn() -> String) -> String {
    let output = output.unwrap_or_else(|e| panic!("{}: {e}", what()));
    assert!(
        output.status.success(),
        "{}: {}\n{}",
        what(),
        output.status,
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?)
}
