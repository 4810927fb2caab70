//! Signals as data: read from a descriptor, with where each came from.

use std::{
    io, mem,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    ptr,
};

use tokio::io::{Interest, unix::AsyncFd};

/// What is passed to the command.
const FORWARDED: [i32; 7] =
    [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2, libc::SIGWINCH];

/// The forwarded signals of this process; they have no other effect from [`Signals::take_over`] on.
#[derive(Debug)]
pub(super) struct Signals(AsyncFd<OwnedFd>);

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Received {
    pub(super) number: i32,
    pub(super) origin: Origin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The kernel, on behalf of the terminal: sent to the whole process group.
    Terminal,
    /// A process, to us alone as far as can be known.
    Process,
}

impl Signals {
    /// Blocks the signals in the calling thread, and so in the threads it starts later. Needs a tokio runtime.
    pub(super) fn take_over() -> io::Result<Self> {
        // SAFETY: `sigset_t` is a plain C structure, for which all zero is a valid value.
        let mut set: libc::sigset_t = unsafe { mem::zeroed() };
        // SAFETY: `set` is writable.
        unsafe { libc::sigemptyset(&raw mut set) };
        for signal in FORWARDED {
            // SAFETY: `set` is writable and initialised.
            unsafe { libc::sigaddset(&raw mut set, signal) };
        }
        // SAFETY: `set` is initialised; a null pointer for the old mask is allowed.
        let error = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: `set` is initialised; -1 asks for a new descriptor.
        let descriptor = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and belongs to nobody else.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        // SAFETY: the descriptor is owned by the AsyncFd and is never replaced or closed within it.
        Ok(Self(unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?))
    }

    /// The next signal. Safe to drop while it waits.
    pub(super) async fn next(&self) -> io::Result<Received> {
        loop {
            let mut ready = self.0.readable().await?;
            if let Ok(received) = ready.try_io(|descriptor| read_one(descriptor.get_ref())) {
                return received;
            }
        }
    }
}

fn read_one(descriptor: &OwnedFd) -> io::Result<Received> {
    const SIZE: usize = size_of::<libc::signalfd_siginfo>();
    // SAFETY: `signalfd_siginfo` consists of integers, for which all zero is a valid value.
    let mut info: libc::signalfd_siginfo = unsafe { mem::zeroed() };
    // SAFETY: the descriptor is open, and `info` is writable for its own size.
    let length = unsafe { libc::read(descriptor.as_raw_fd(), (&raw mut info).cast(), SIZE) };
    if usize::try_from(length) != Ok(SIZE) {
        return Err(io::Error::last_os_error());
    }
    let origin = if info.ssi_code == libc::SI_KERNEL { Origin::Terminal } else { Origin::Process };
    Ok(Received { number: info.ssi_signo.cast_signed(), origin })
}
