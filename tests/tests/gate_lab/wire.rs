//! A link's one end: frames put on it as they are, and what of them arrived behind the gate.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
    time::Duration,
};

use portcullis_tests::{clock, world::Namespace};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, netdevice::name_to_index, send, socket_with};

use super::frames::Mac;

/// An interface on which frames are sent as they are.
pub(crate) struct Wire {
    socket: OwnedFd,
}

impl Wire {
    #[track_caller]
    pub(crate) fn open(namespace: &Namespace, interface: &str) -> Self {
        Self { socket: namespace.run(|| open(interface)).unwrap() }
    }

    #[track_caller]
    pub(crate) fn send(&self, frame: &[u8]) {
        assert_eq!(send(&self.socket, frame, SendFlags::empty()), Ok(frame.len()));
    }

    /// Sends a frame that a classifier of the sending host may refuse.
    pub(crate) fn try_send(&self, frame: &[u8]) {
        _ = send(&self.socket, frame, SendFlags::empty());
    }
}

fn open(interface: &str) -> io::Result<OwnedFd> {
    // Protocol 0: it only sends.
    let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    let index = name_to_index(&socket, interface)?;
    // SAFETY: plain integers and bytes, of which zero is a value.
    let mut name: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    name.sll_family = u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?;
    name.sll_ifindex = i32::try_from(index).map_err(io::Error::other)?;
    let length = libc::socklen_t::try_from(size_of_val(&name)).map_err(io::Error::other)?;
    // SAFETY: `name` is a link-layer address of `length` bytes that outlives the call.
    match unsafe { libc::bind(socket.as_raw_fd(), (&raw const name).cast(), length) } {
        0 => Ok(socket),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An interface's hardware address.
#[track_caller]
pub(crate) fn mac(namespace: &Namespace, interface: &str) -> Mac {
    let shown = namespace.ip(&format!("-o link show dev {interface}"));
    let text = shown.split("link/ether ").nth(1).unwrap().split(' ').next().unwrap();
    let bytes: Vec<u8> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

/// UDP sockets of a host that tell what reached them.
pub(crate) struct Inbox {
    service: Vec<UdpSocket>,
    control: UdpSocket,
}

impl Inbox {
    /// Sockets at the service's addresses, and one at an address that no gate cuts.
    #[track_caller]
    pub(crate) fn open(namespace: &Namespace, service: &[&str], control: &str) -> Self {
        let bind = |address: &str| {
            let socket = namespace.run(|| UdpSocket::bind(address)).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        Self { service: service.iter().map(|address| bind(address)).collect(), control: bind(control) }
    }

    pub(crate) fn control_address(&self) -> SocketAddr {
        self.control.local_addr().unwrap()
    }

    /// Sends `frames` and then `marker`, a datagram to the control address, on the same wire; when the marker has arrived, so
    /// has what was sent before it. Returns how many datagrams the service got.
    #[track_caller]
    pub(crate) fn deliver(&self, wire: &Wire, frames: &[Vec<u8>], marker: &[u8]) -> usize {
        for frame in frames {
            // Of a host whose own gate is closed the classifier refuses them.
            wire.try_send(frame);
        }
        // Frames of one wire keep their order, but for those that the sender put on it from another CPU.
        for _ in 0..3 {
            wire.send(marker);
            let arrived = clock::wait_until(Duration::from_secs(5), || drain(&self.control) > 0);
            assert!(arrived, "the control datagram did not arrive");
        }
        self.service.iter().map(drain).sum()
    }
}

/// Empties a socket, and returns how many datagrams were in it.
pub(crate) fn drain(socket: &UdpSocket) -> usize {
    let mut buffer = [0; 16384];
    std::iter::from_fn(|| socket.recv(&mut buffer).ok()).count()
}
