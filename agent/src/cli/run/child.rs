//! The command that runs under the lease.

use std::{ffi::OsString, io, mem, os::unix::process::ExitStatusExt as _, path::PathBuf, process::ExitStatus, ptr};

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};
use tokio::process::{Child, Command};

use super::RunError;

/// Starts `command` in this process group; it dies with the calling thread. It blocks no signal: a mask outlives exec, and
/// this thread's blocks every signal that is passed on.
pub(super) fn start(command: &[OsString], service: &str, token: u64) -> Result<Child, RunError> {
    let (program, arguments) = command.split_first().map_or((None, command), |(program, rest)| (Some(program), rest));
    let program = program.cloned().unwrap_or_default();
    let parent = getpid();
    let mut prepared = Command::new(&program);
    prepared.args(arguments).env("PORTCULLIS_TOKEN", token.to_string()).env("PORTCULLIS_SERVICE", service);
    prepared.kill_on_drop(true);
    // SAFETY: between fork and exec the closure makes three system calls, and none allocates or takes a lock.
    unsafe {
        prepared.pre_exec(move || die_with(parent).and_then(|()| block_nothing()));
    }
    prepared.spawn().map_err(|source| RunError::Start { command: PathBuf::from(program), source })
}

fn die_with(parent: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have died before the line above; then nobody would ever send the signal.
    if getppid() == Some(parent) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
}

fn block_nothing() -> io::Result<()> {
    // SAFETY: `sigset_t` is a plain C structure, for which all zero is a valid value.
    let mut none: libc::sigset_t = unsafe { mem::zeroed() };
    // SAFETY: `none` is writable.
    unsafe { libc::sigemptyset(&raw mut none) };
    // SAFETY: `none` is initialised; a null pointer for the old mask is allowed.
    let error = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()) };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// Sends `number` to the command. It has not been waited for, so its id is still its own; if it has just ended, the
/// signal goes nowhere.
pub(super) fn signal(child: &Child, number: i32) {
    let pid = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    if let (Some(pid), Some(signal)) = (pid, Signal::from_named_raw(number)) {
        _ = rustix::process::kill_process(pid, signal);
    }
}

/// The command's own exit status, or 128 and the signal that ended it.
pub(super) fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|number| 128 + number));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}
