//! The sockets that listen in this thread's network namespace.
//!
//! From sock_diag rather than `/proc/net/tcp`: the kernel picks out the few that listen, where the files name every
//! connection of the host, and only sock_diag says whether an IPv6 socket takes IPv4. SCTP is left out: to ask for it
//! would load its module.

use std::io;

use netlink_packet_core::{DecodeError, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    constants::{AF_INET, AF_INET6, IPPROTO_TCP, IPPROTO_UDP},
    inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags, nlas::Nla},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_SOCK_DIAG};
use thiserror::Error;

use super::Listener;
use crate::config::model::Protocol;

/// Why it is not known what listens. No gate depends on it.
#[derive(Debug, Error)]
pub enum CoverageError {
    #[error("cannot open a sock_diag socket: {0}; allow AF_NETLINK to the agent's unit")]
    Open(#[source] io::Error),
    #[error("cannot list the {protocol} listeners: {source}; is the kernel module {protocol}_diag there?")]
    List { protocol: Protocol, source: io::Error },
    #[error("cannot read the kernel's list of {protocol} listeners: {source}; report this with the kernel's version")]
    Answer { protocol: Protocol, source: DecodeError },
}

/// Every listener of TCP and UDP, IPv4 and IPv6.
///
/// # Errors
/// When the kernel does not answer, or not in its own format.
pub fn listeners() -> Result<Vec<Listener>, CoverageError> {
    let open = || {
        let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(socket)
    };
    let socket = open().map_err(CoverageError::Open)?;
    let mut found = Vec::new();
    for (protocol, number, states) in [
        (Protocol::Tcp, IPPROTO_TCP, StateFlags::LISTEN),
        // The state of a UDP socket without a peer.
        (Protocol::Udp, IPPROTO_UDP, StateFlags::CLOSE),
    ] {
        for (family, socket_id) in [(AF_INET, SocketId::new_v4()), (AF_INET6, SocketId::new_v6())] {
            let extensions = ExtensionFlags::empty();
            let states = states.clone();
            let request = InetRequest { family, protocol: number, extensions, states, socket_id };
            list(&socket, protocol, request, &mut found)?;
        }
    }
    Ok(found)
}

fn list(
    socket: &Socket,
    protocol: Protocol,
    request: InetRequest,
    found: &mut Vec<Listener>,
) -> Result<(), CoverageError> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let mut message = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request).into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);

    let failed = |source| CoverageError::List { protocol, source };
    socket.send(&bytes, 0).map_err(failed)?;
    loop {
        let (datagram, _) = socket.recv_from_full().map_err(failed)?;
        let mut rest = &datagram[..];
        while !rest.is_empty() {
            let message = NetlinkMessage::<SockDiagMessage>::deserialize(rest)
                .map_err(|source| CoverageError::Answer { protocol, source })?;
            // Messages are aligned to four bytes, the last one need not be.
            let length = usize::try_from(message.header.length).unwrap_or(usize::MAX);
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            match message.payload {
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
                    found.push(listener(protocol, &response));
                }
                NetlinkPayload::Done(_) => return Ok(()),
                NetlinkPayload::Error(error) => return Err(failed(error.to_io())),
                // Nothing else is asked for; newer kernels may say more.
                _ => {}
            }
        }
    }
}

fn listener(protocol: Protocol, response: &InetResponse) -> Listener {
    let header = &response.header;
    Listener {
        protocol,
        address: header.socket_id.source_address,
        port: header.socket_id.source_port,
        v6_only: response.nlas.iter().any(|attribute| matches!(attribute, Nla::SkV6Only(true))),
        inode: header.inode,
    }
}
