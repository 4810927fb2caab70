//! Who is at the other end of a connection, as the kernel recorded it when the connection was made.

use std::{ffi::CString, fmt, io, mem, os::fd::AsRawFd as _};

use tokio::net::UnixStream;

/// Groups of a peer that are looked at, at most: the kernel's own limit (NGROUPS_MAX).
const MAX_GROUPS: usize = 65536;

/// The process that connected. A process id may be another's by the time it is read; user and groups may not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub uid: u32,
    pub gid: u32,
    /// 0: of another process id namespace.
    pub pid: i32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// What a peer may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Access {
    None,
    Read,
    Change,
}

impl Peer {
    /// Asks the kernel with SO_PEERCRED and SO_PEERGROUPS: both tell of the moment of `connect`, so unlike
    /// `/proc/PID/status` they cannot be of a process that has since taken over the number.
    pub fn of(stream: &UnixStream) -> io::Result<Self> {
        let credentials = stream.peer_cred()?;
        Ok(Self {
            uid: credentials.uid(),
            gid: credentials.gid(),
            pid: credentials.pid().unwrap_or(0),
            groups: groups_of(stream)?,
        })
    }

    /// Root changes; root and the members of `group`, by primary or supplementary group, read.
    pub fn access(&self, group: Option<u32>) -> Access {
        if self.uid == 0 {
            return Access::Change;
        }
        match group {
            Some(group) if self.gid == group || self.groups.contains(&group) => Access::Read,
            Some(_) | None => Access::None,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "uid {} gid {} pid {}", self.uid, self.gid, self.pid)
    }
}

fn groups_of(stream: &UnixStream) -> io::Result<Vec<u32>> {
    let mut groups: Vec<u32> = vec![0; 32];
    loop {
        let size = groups.len() * size_of::<u32>();
        let mut length = libc::socklen_t::try_from(size).map_err(io::Error::other)?;
        // SAFETY: `groups` is writable for `length` bytes, `length` is a valid pointer to the buffer's size, and the
        // descriptor is open for as long as `stream` is borrowed.
        let result = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let error = io::Error::last_os_error();
        if result == 0 {
            groups.truncate(length as usize / size_of::<u32>());
            return Ok(groups);
        }
        if error.raw_os_error() != Some(libc::ERANGE) || groups.len() >= MAX_GROUPS {
            return Err(error);
        }
        groups.resize((groups.len() * 2).min(MAX_GROUPS), 0);
    }
}

/// The id of the group named `name`; nothing if there is none. May ask a directory service, so only at start-up.
pub fn group_id(name: &str) -> io::Result<Option<u32>> {
    let Ok(name) = CString::new(name) else { return Ok(None) };
    let mut buffer: Vec<libc::c_char> = vec![0; 4096];
    loop {
        // SAFETY: `group` is a plain C structure, for which all zero is a valid value.
        let mut group: libc::group = unsafe { mem::zeroed() };
        let mut found = std::ptr::null_mut();
        // SAFETY: `name` ends in NUL, `group`, `buffer` (of the length given) and `found` are writable and outlive the call.
        let errno = unsafe {
            libc::getgrnam_r(name.as_ptr(), &raw mut group, buffer.as_mut_ptr(), buffer.len(), &raw mut found)
        };
        match errno {
            0 if found.is_null() => return Ok(None),
            0 => return Ok(Some(group.gr_gid)),
            libc::ERANGE if buffer.len() < 1 << 20 => buffer.resize(buffer.len() * 2, 0),
            // "Not found" in the words of several directory services.
            libc::ENOENT | libc::ESRCH => return Ok(None),
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
    }
}
