//! The raw system calls of the data path: the commands of bpf(2) for which aya has no call that fits.
//!
//! aya attaches through names and falls back silently to attachments that cannot be pinned; links here are made,
//! replaced and looked up by interface index and by descriptor, and a refusal stays a refusal.

use std::{
    ffi::CString,
    io,
    mem::{size_of, size_of_val},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    os::unix::ffi::OsStrExt,
    path::Path,
};

const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_PROG_GET_FD_BY_ID: libc::c_int = 13;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_PROG_QUERY: libc::c_int = 16;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_UPDATE: libc::c_int = 29;
const BPF_LINK_DETACH: libc::c_int = 34;

/// `enum bpf_attach_type`, those that are used.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttachType {
    CgroupIngress = 0,
    CgroupEgress = 1,
    CgroupSockOps = 3,
    Xdp = 37,
    TcxIngress = 46,
    TcxEgress = 47,
}

/// Flags of a link's creation.
pub(super) mod link_flags {
    /// TCX: before every other program.
    pub(crate) const FIRST: u32 = 1 << 3;
    pub(crate) const XDP_GENERIC: u32 = 1 << 1;
    pub(crate) const XDP_NATIVE: u32 = 1 << 2;
}

/// What a link is attached to, as the kernel tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkTarget {
    /// Interface index, 0 once the device is gone.
    Xdp(u32),
    /// Interface index, 0 once the device is gone.
    Tcx(u32, u32),
    /// Inode of the cgroup's folder, 0 once it is removed; attach type.
    Cgroup(u64, u32),
    /// Another type of link.
    Other(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkInfo {
    pub(super) id: u32,
    pub(super) target: LinkTarget,
}

/// One program in the order of a TCX hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TcxEntry {
    pub(super) program: u32,
    /// 0: attached without a link.
    pub(super) link: u32,
}

/// What a descriptor from a pin is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObjectKind {
    Map,
    Program,
    Link,
    Other,
}

/// Calls bpf(2) with `attr`, one of the variants of `union bpf_attr`.
fn bpf<T>(command: libc::c_int, attr: &mut T) -> io::Result<i32> {
    // SAFETY: `attr` is a live, exclusively borrowed value of the size that is passed, made of integers without
    // padding; every pointer in it was made from a buffer that its caller keeps alive over the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    match i32::try_from(result) {
        Ok(value) if value >= 0 => Ok(value),
        _ => Err(io::Error::last_os_error()),
    }
}

fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel has just returned this descriptor to us, so it is open and nobody else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn raw(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

fn pointer<T: ?Sized>(value: &T) -> u64 {
    std::ptr::from_ref(value).cast::<u8>().expose_provenance() as u64
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

/// Attaches `program` to `target`: an interface index, or a cgroup folder's descriptor as a number.
pub(super) fn link_create(program: BorrowedFd<'_>, target: u32, kind: AttachType, flags: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attr {
        program: u32,
        target: u32,
        kind: u32,
        flags: u32,
        relative: u32,
        pad: u32,
        revision: u64,
    }
    let mut attr = Attr { program: raw(program), target, kind: kind as u32, flags, relative: 0, pad: 0, revision: 0 };
    bpf(BPF_LINK_CREATE, &mut attr).map(owned)
}

/// Attaches `program` to the cgroup whose folder `cgroup` is.
pub(super) fn link_create_cgroup(
    program: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
    kind: AttachType,
) -> io::Result<OwnedFd> {
    link_create(program, raw(cgroup), kind, 0)
}

/// Replaces the program behind a link; no packet sees neither.
pub(super) fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = [raw(link), raw(program), 0u32, 0u32];
    bpf(BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// Detaches a link at once. Without this the kernel does it some time after the last descriptor and pin are gone. A link
/// that is dead already, or of a kernel without the command (5.9), is left to that.
pub(super) fn link_detach(link: BorrowedFd<'_>) {
    let mut attr = [raw(link)];
    let _ = bpf(BPF_LINK_DETACH, &mut attr);
}

/// Pins an object.
pub(super) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    #[repr(C)]
    struct Attr {
        path: u64,
        fd: u32,
        flags: u32,
    }
    let path = c_path(path)?;
    let mut attr = Attr { path: pointer(path.as_c_str()), fd: raw(object), flags: 0 };
    bpf(BPF_OBJ_PIN, &mut attr).map(drop)
}

/// Opens a pinned object and tells what it is.
pub(super) fn open_pin(path: &Path) -> io::Result<(OwnedFd, ObjectKind)> {
    #[repr(C)]
    struct Attr {
        path: u64,
        fd: u32,
        flags: u32,
    }
    let path = c_path(path)?;
    let mut attr = Attr { path: pointer(path.as_c_str()), fd: 0, flags: 0 };
    let fd = bpf(BPF_OBJ_GET, &mut attr).map(owned)?;
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    let name = name.to_string_lossy();
    // The kernel names them `bpf-map`, `bpf-prog` and, depending on the version, `bpf_link` or `bpf-link`.
    let kind = if name.contains("bpf-map") {
        ObjectKind::Map
    } else if name.contains("bpf-prog") {
        ObjectKind::Program
    } else if name.contains("bpf_link") || name.contains("bpf-link") {
        ObjectKind::Link
    } else {
        ObjectKind::Other
    };
    Ok((fd, kind))
}

fn object_info<const WORDS: usize>(object: BorrowedFd<'_>) -> io::Result<[u64; WORDS]> {
    #[repr(C)]
    struct Attr {
        fd: u32,
        size: u32,
        info: u64,
    }
    let mut info = [0u64; WORDS];
    let size = u32::try_from(size_of_val(&info)).unwrap_or(u32::MAX);
    let mut attr = Attr { fd: raw(object), size, info: std::ptr::from_mut(&mut info).expose_provenance() as u64 };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info)
}

/// Low and high half of a word of the kernel's structures.
fn halves(word: u64) -> (u32, u32) {
    let bytes = word.to_ne_bytes();
    let [a, b, c, d, e, f, g, h] = bytes;
    (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]))
}

/// What the kernel says of a link.
pub(super) fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    const CGROUP: u32 = 3;
    const XDP: u32 = 6;
    const TCX: u32 = 11;
    // `struct bpf_link_info`: type and id, program id and padding, then the union.
    let info = object_info::<8>(link)?;
    let (kind, id) = halves(info[0]);
    let (index, attach_type) = halves(info[2]);
    let target = match kind {
        CGROUP => LinkTarget::Cgroup(info[2], halves(info[3]).0),
        XDP => LinkTarget::Xdp(index),
        TCX => LinkTarget::Tcx(index, attach_type),
        other => LinkTarget::Other(other),
    };
    Ok(LinkInfo { id, target })
}

/// The name of a loaded program, at most 15 bytes.
pub(super) fn program_name(id: u32) -> io::Result<String> {
    // `struct bpf_prog_info`: the name stands at byte 64.
    let mut attr = [id, 0u32, 0u32];
    let program = bpf(BPF_PROG_GET_FD_BY_ID, &mut attr).map(owned)?;
    let info = object_info::<10>(program.as_fd())?;
    let name: Vec<u8> = info[8..10].iter().flat_map(|word| word.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
    Ok(String::from_utf8_lossy(&name).into_owned())
}

/// Returns when every BPF program that ran at the call has ended: a grace period of RCU, some milliseconds.
pub(super) fn wait_out_programs() -> io::Result<()> {
    // SAFETY: the call takes three numbers and touches no memory of ours.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The programs of a TCX hook in the order in which they run. `EINVAL`: this kernel has no TCX.
pub(super) fn tcx_query(interface: u32, kind: AttachType) -> io::Result<Vec<TcxEntry>> {
    #[repr(C)]
    #[derive(Default)]
    struct Attr {
        target: u32,
        kind: u32,
        query_flags: u32,
        attach_flags: u32,
        programs: u64,
        count: u32,
        pad: u32,
        program_flags: u64,
        links: u64,
        link_flags: u64,
        revision: u64,
    }
    // The kernel's own bound on programs of one hook.
    const MOST: usize = 64;
    let mut programs = [0u32; MOST];
    let mut links = [0u32; MOST];
    let mut attr = Attr {
        target: interface,
        kind: kind as u32,
        count: 64,
        programs: std::ptr::from_mut(&mut programs).expose_provenance() as u64,
        links: std::ptr::from_mut(&mut links).expose_provenance() as u64,
        ..Attr::default()
    };
    bpf(BPF_PROG_QUERY, &mut attr)?;
    let count = usize::try_from(attr.count).unwrap_or(MOST).min(MOST);
    Ok(programs.iter().zip(&links).take(count).map(|(&program, &link)| TcxEntry { program, link }).collect())
}
