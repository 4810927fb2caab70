//! Many packets per system call, with the kernel's time stamps and its count of what a socket's queue could not take.

use std::{
    io,
    mem::{MaybeUninit, size_of, zeroed},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    ptr,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::sockopt::set_socket_recv_buffer_size_force,
};

/// Packets per system call, at most.
pub const BATCH: usize = 64;
/// Bytes of a packet that are kept.
pub(super) const SNAP: usize = 128;
/// Room for what the kernel says beside a packet: one time stamp.
const CONTROL: usize = 64;
/// A second of heavy traffic fits, for a receiver that is off the CPU.
const RECEIVE_BUFFER: usize = 128 << 20;

/// One packet of a batch.
#[derive(Debug)]
pub(super) struct Received<'a> {
    /// At most [`SNAP`] bytes of it.
    pub(super) bytes: &'a [u8],
    /// Its whole length.
    pub(super) length: u32,
    /// When the kernel took it in, wall clock.
    pub(super) wall_ns: u64,
    /// For a packet socket: it was sent by this interface's own host.
    pub(super) outgoing: bool,
}

#[repr(align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL]);

/// The buffers of a receiver.
pub(super) struct Receiver {
    packets: Vec<[u8; SNAP]>,
    controls: Vec<Control>,
    names: Vec<libc::sockaddr_ll>,
}

impl Receiver {
    /// Prepares a socket for measuring: a large queue, a kernel time stamp per packet.
    pub(super) fn prepare(socket: BorrowedFd<'_>) -> io::Result<Self> {
        set_socket_recv_buffer_size_force(socket, RECEIVE_BUFFER)?;
        let on: libc::c_int = 1;
        let length = socklen::<libc::c_int>();
        let option = libc::SO_TIMESTAMPNS;
        // SAFETY: the option takes an int, and `on` outlives the call.
        check(unsafe {
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, (&raw const on).cast(), length)
        })?;
        // SAFETY: plain integers and bytes, of which zero is a value.
        let name: libc::sockaddr_ll = unsafe { zeroed() };
        Ok(Self {
            packets: vec![[0; SNAP]; BATCH],
            controls: vec![Control([0; CONTROL]); BATCH],
            names: vec![name; BATCH],
        })
    }

    /// Waits up to `timeout` for packets and gives each of a batch to `take`; returns how many there were.
    pub(super) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        timeout: Duration,
        mut take: impl FnMut(Received<'_>),
    ) -> io::Result<usize> {
        let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(0),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let mut vectors: Vec<libc::iovec> = self
            .packets
            .iter_mut()
            .map(|packet| libc::iovec { iov_base: packet.as_mut_ptr().cast(), iov_len: SNAP })
            .collect();
        let mut messages: Vec<libc::mmsghdr> = (vectors.iter_mut().zip(&mut self.controls).zip(&mut self.names))
            .map(|((vector, control), name)| {
                // SAFETY: pointers and integers, of which zero is a value.
                let mut message: libc::mmsghdr = unsafe { zeroed() };
                message.msg_hdr.msg_name = ptr::from_mut(name).cast();
                message.msg_hdr.msg_namelen = socklen::<libc::sockaddr_ll>();
                message.msg_hdr.msg_iov = vector;
                message.msg_hdr.msg_iovlen = 1;
                message.msg_hdr.msg_control = control.0.as_mut_ptr().cast();
                message.msg_hdr.msg_controllen = CONTROL;
                message
            })
            .collect();
        let count = libc::c_uint::try_from(messages.len()).map_err(io::Error::other)?;
        // MSG_TRUNC: report the whole length of a packet of which only the start is kept.
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        // SAFETY: `messages` has `count` entries, and every buffer they point to is alive, of the length given, and
        // borrowed by nobody else.
        let got = unsafe { libc::recvmmsg(socket.as_raw_fd(), messages.as_mut_ptr(), count, flags, ptr::null_mut()) };
        let got = match usize::try_from(got) {
            Ok(got) => got,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => 0,
                error => return Err(error),
            },
        };
        for (i, message) in messages.iter().take(got).enumerate() {
            let kept = usize::try_from(message.msg_len).map_or(SNAP, |length| length.min(SNAP));
            take(Received {
                bytes: &self.packets[i][..kept],
                length: message.msg_len,
                wall_ns: wall_stamp(&message.msg_hdr)
                    .ok_or_else(|| io::Error::other("the kernel gave a packet no time stamp"))?,
                outgoing: self.names[i].sll_pkttype == libc::PACKET_OUTGOING,
            });
        }
        Ok(got)
    }
}

/// Packets that the socket's queue could not take since it was made.
pub(super) fn queue_drops(socket: BorrowedFd<'_>) -> io::Result<u64> {
    // Index of the drop count in what SO_MEMINFO returns (linux/sock_diag.h).
    const SK_MEMINFO_DROPS: usize = 8;
    let mut info = [0u32; SK_MEMINFO_DROPS + 1];
    let mut length = socklen::<[u32; SK_MEMINFO_DROPS + 1]>();
    // SAFETY: the kernel writes at most `length` bytes, the size of `info`.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    })?;
    Ok(u64::from(info[SK_MEMINFO_DROPS]))
}

/// Frames that the machine's CPUs threw away because their backlog was full, since boot: losses that no gate caused.
pub(super) fn backlog_drops() -> u64 {
    let table = std::fs::read_to_string("/proc/net/softnet_stat").expect("/proc is mounted");
    table.lines().filter_map(|line| u64::from_str_radix(line.split(' ').nth(1)?, 16).ok()).sum()
}

/// Binds a packet socket to an interface by its index.
pub(super) fn bind_to_interface(socket: impl AsFd, index: u32) -> io::Result<()> {
    // SAFETY: plain integers and bytes, of which zero is a value.
    let mut name: libc::sockaddr_ll = unsafe { zeroed() };
    name.sll_family = u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?;
    name.sll_protocol = u16::try_from(libc::ETH_P_ALL).map_err(io::Error::other)?.to_be();
    name.sll_ifindex = i32::try_from(index).map_err(io::Error::other)?;
    let length = socklen::<libc::sockaddr_ll>();
    // SAFETY: `name` is a link-layer address of `length` bytes that outlives the call.
    check(unsafe { libc::bind(socket.as_fd().as_raw_fd(), (&raw const name).cast(), length) })
}

fn wall_stamp(header: &libc::msghdr) -> Option<u64> {
    // SAFETY: the kernel has filled `header`, whose control buffer is alive.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !next.is_null() {
        // SAFETY: not null, and inside the control buffer, which is aligned for it.
        let control = unsafe { &*next };
        if control.cmsg_level == libc::SOL_SOCKET && control.cmsg_type == libc::SCM_TIMESTAMPNS {
            let mut time = MaybeUninit::<libc::timespec>::uninit();
            // SAFETY: `next` is a valid control header.
            let data = unsafe { libc::CMSG_DATA(next) };
            // SAFETY: the data of this type of control message is a timespec; the two do not overlap.
            unsafe { ptr::copy_nonoverlapping(data, time.as_mut_ptr().cast(), size_of::<libc::timespec>()) };
            // SAFETY: filled by the line above.
            let time = unsafe { time.assume_init() };
            return Some(time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned());
        }
        // SAFETY: `next` is a control header of `header`.
        next = unsafe { libc::CMSG_NXTHDR(header, next) };
    }
    None
}

fn socklen<T>() -> libc::socklen_t {
    libc::socklen_t::try_from(size_of::<T>()).expect("smaller than 4 GiB")
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use rustix::net::sockopt::set_socket_recv_buffer_size;

    use super::*;

    #[test]
    fn what_a_queue_cannot_take_is_counted() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a port is free");
        let to = socket.local_addr().expect("it is bound");
        let mut receiver = Receiver::prepare(socket.as_fd()).expect("the options are known");
        set_socket_recv_buffer_size(&socket, 4096).expect("a small queue is allowed");
        let sender = UdpSocket::bind("127.0.0.1:0").expect("a port is free");
        for _ in 0..1000 {
            sender.send_to(&[7; 200], to).expect("loopback takes it");
        }
        let mut kept = 0;
        let mut take = |received: Received<'_>| {
            assert_eq!((received.bytes, received.length), (&[7; SNAP][..], 200));
            kept += 1;
        };
        while receiver.receive(socket.as_fd(), Duration::from_millis(100), &mut take).expect("it is readable") > 0 {}
        let drops = queue_drops(socket.as_fd()).expect("the option is known");
        assert!(kept > 0 && drops > 0);
        assert_eq!(kept + drops, 1000);
    }
}
