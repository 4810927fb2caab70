//! A process of a test: signalled through its pidfd, ended and reaped when dropped.

use std::{
    fs::{self, File},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{
        Pid, PidfdFlags, PidfdGetfdFlags, Signal, WaitId, WaitIdOptions, pidfd_getfd, pidfd_open, pidfd_send_signal,
        waitid,
    },
};

/// How long a process may take to end by itself when asked to.
const END: Duration = Duration::from_secs(10);

/// A running (or ended) process. Dropping it kills and reaps it; if the test fails, its log is printed.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    pidfd: OwnedFd,
    log: PathBuf,
    status: Option<ExitStatus>,
}

impl Process {
    /// Starts `command` with its output appended to `NAME.log` in `folder`.
    #[track_caller]
    pub(super) fn spawn(name: &str, command: &mut Command, folder: &Path) -> Self {
        let log = folder.join(format!("{name}.log"));
        let out = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .unwrap_or_else(|e| panic!("open the log {}: {e}", log.display()));
        let err = out.try_clone().unwrap_or_else(|e| panic!("open the log {}: {e}", log.display()));
        let child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .unwrap_or_else(|e| panic!("start {name} ({command:?}): {e}"));
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())
            .unwrap_or_else(|e| panic!("open a pidfd of {name}: {e}"));
        Self { name: name.to_owned(), child, pidfd, log, status: None }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What the process has written to its standard output and error.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Its exit status if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.wait(Duration::ZERO)
    }

    /// Waits for it to end; nothing if it does not within `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        if self.status.is_none() {
            let timeout = Timespec::try_from(timeout).expect("a test's timeout fits");
            // Readable once the process has ended.
            poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&timeout))
                .unwrap_or_else(|e| panic!("wait for {}: {e}", self.name));
            self.status = self.child.try_wait().unwrap_or_else(|e| panic!("reap {}: {e}", self.name));
        }
        self.status
    }

    /// SIGKILL, and waits until the process is gone.
    pub fn kill(&mut self) -> ExitStatus {
        self.signal(Signal::KILL);
        self.wait(END).unwrap_or_else(|| panic!("{} does not end by SIGKILL", self.name))
    }

    /// SIGTERM, and waits until the process has ended.
    #[track_caller]
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.wait(END).unwrap_or_else(|| panic!("{} does not end by SIGTERM", self.name))
    }

    /// SIGSTOP, and waits until the process has stopped.
    #[track_caller]
    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(Pid::from_child(&self.child)), options)
            .unwrap_or_else(|e| panic!("wait for {} to stop: {e}", self.name));
        assert!(status.is_some_and(|status| status.stopped()), "{} ended before it could be stopped", self.name);
    }

    /// A descriptor of the process, as one of our own; it is shared from now on.
    ///
    /// # Errors
    /// As `pidfd_getfd(2)`: the process has ended, or has no such descriptor.
    pub fn borrow_descriptor(&self, number: i32) -> std::io::Result<OwnedFd> {
        Ok(pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty())?)
    }

    /// SIGCONT.
    pub fn cont(&self) {
        self.signal(Signal::CONT);
    }

    /// Sends a signal; a process that has ended takes none.
    pub fn signal(&self, signal: Signal) {
        if self.status.is_none() {
            match pidfd_send_signal(&self.pidfd, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => panic!("send {signal:?} to {}: {error}", self.name),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.status.is_none() {
            self.kill();
        }
        if thread::panicking() {
            eprintln!("--- log of {}, {:?} ---\n{}", self.name, self.status, self.log());
        }
    }
}

/// A program of this workspace. The environment variable `PORTCULLIS_BIN` names the agent's; otherwise it stands beside the
/// test's executable in cargo's target folder.
pub fn binary(name: &str) -> PathBuf {
    if name == "portcullis"
        && let Some(path) = std::env::var_os("PORTCULLIS_BIN")
    {
        return path.into();
    }
    let executable = std::env::current_exe().expect("the test's own path");
    executable.ancestors().skip(1).take(2).map(|folder| folder.join(name)).find(|path| path.is_file()).unwrap_or_else(
        || panic!("no {name} beside {}: cargo build -p portcullis -p portcullis-tests", executable.display()),
    )
}
