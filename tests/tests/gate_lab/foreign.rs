//! Programs of somebody else: two instructions that let everything pass, attached by hand.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_LINK_CREATE: libc::c_int = 28;

/// What the kernel lists the programs by.
pub(crate) const NAME: &str = "stranger";

#[derive(Clone, Copy, Debug)]
pub(crate) enum Hook {
    Xdp,
    TcxIngress,
    TcxEgress,
}

impl Hook {
    const fn program_type(self) -> u32 {
        match self {
            Self::TcxIngress | Self::TcxEgress => 3,
            Self::Xdp => 6,
        }
    }

    const fn attach_type(self) -> u32 {
        match self {
            Self::Xdp => 37,
            Self::TcxIngress => 46,
            Self::TcxEgress => 47,
        }
    }

    /// `TC_ACT_OK`, `XDP_PASS`.
    const fn pass(self) -> u32 {
        match self {
            Self::TcxIngress | Self::TcxEgress => 0,
            Self::Xdp => 2,
        }
    }

    /// Before every other program; in driver mode.
    const fn flags(self) -> u32 {
        match self {
            Self::TcxIngress | Self::TcxEgress => 1 << 3,
            Self::Xdp => 1 << 2,
        }
    }
}

/// A foreign program, attached as long as this lives.
pub(crate) struct Foreign {
    _link: OwnedFd,
}

impl Foreign {
    /// Attaches to an interface of the calling thread's network namespace.
    pub(crate) fn attach(hook: Hook, interface: u32) -> io::Result<Self> {
        let program = load(hook)?;
        let mut attr = [0u32; 16];
        attr[0] = program.as_raw_fd().cast_unsigned();
        attr[1] = interface;
        attr[2] = hook.attach_type();
        attr[3] = hook.flags();
        Ok(Self { _link: bpf(BPF_LINK_CREATE, &attr)? })
    }
}

fn load(hook: Hook) -> io::Result<OwnedFd> {
    // r0 = the answer; exit.
    let instructions: [u64; 2] = [0xb7 | u64::from(hook.pass()) << 32, 0x95];
    let license = c"GPL";
    let halves = |pointer: usize| {
        let bytes = u64::try_from(pointer).unwrap().to_ne_bytes();
        let (first, second) = bytes.split_at(4);
        [first, second].map(|half| u32::from_ne_bytes(half.try_into().unwrap()))
    };
    let mut attr = [0u32; 32];
    attr[0] = hook.program_type();
    attr[1] = u32::try_from(instructions.len()).unwrap();
    attr[2..4].copy_from_slice(&halves(instructions.as_ptr().expose_provenance()));
    attr[4..6].copy_from_slice(&halves(license.as_ptr().expose_provenance()));
    for (word, bytes) in attr[12..].iter_mut().zip(NAME.as_bytes().chunks(4)) {
        *word = u32::from_ne_bytes(bytes.try_into().unwrap());
    }
    bpf(BPF_PROG_LOAD, &attr)
}

fn bpf(command: libc::c_int, attr: &[u32]) -> io::Result<OwnedFd> {
    // SAFETY: `attr` is the kernel's layout of the command, zero-padded, and what it points to lives over the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command, attr.as_ptr(), size_of_val(attr)) };
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel made the descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The number of an interface in the calling thread's network namespace.
pub(crate) fn index(interface: &str) -> u32 {
    let name = std::ffi::CString::new(interface).unwrap();
    // SAFETY: `name` is a string that outlives the call.
    unsafe { libc::if_nametoindex(name.as_ptr()) }
}
