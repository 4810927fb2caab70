//! Stamps: the boot-clock instant at which a socket was made, in storage of the socket itself.

use core::ptr;

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_SK_STORAGE_GET_F_CREATE, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB, BPF_SOCK_OPS_TCP_CONNECT_CB,
        bpf_sock,
    },
    helpers::{bpf_ktime_get_boot_ns, bpf_sk_fullsock, bpf_sk_storage_get},
    programs::SockOpsContext,
};
use portcullis_common::{layout::Event, packet::protocol, verdict::Socket};

use crate::{maps::STAMPS, packets::note};

const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;
const SOCK_RAW: u32 = 3;
/// `TCP_LISTEN` of include/net/tcp_states.h.
const LISTEN: u32 = 10;

/// Stamps a TCP socket when it connects or is accepted, before it can send a byte of its process (fast open too).
///
/// Every TCP socket of the host, whosever it is: a service configured later finds its connections stamped.
#[inline(always)]
pub(crate) fn stamp_connection(context: &SockOpsContext) {
    if !matches!(context.op(), BPF_SOCK_OPS_TCP_CONNECT_CB | BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB) {
        return;
    }
    // SAFETY: the context is the program's own.
    let operations = unsafe { &*context.ops };
    // SAFETY: reading a pointer-sized union field that the verifier types.
    let socket = unsafe { operations.__bindgen_anon_2.sk };
    if !socket.is_null() && !stamp_anew(socket, now()) {
        note(Event::StampFailed);
    }
}

/// The socket that sends a packet, or in a cgroup the one that receives it.
#[inline(always)]
pub(crate) fn of(skb: *mut __sk_buff) -> Socket {
    let Some(socket) = full_socket(skb) else { return Socket::None };
    // SAFETY: checked for null and full by `full_socket`.
    let fields = unsafe { &*socket };
    // The kernel's own control sockets send resets and echo replies for everybody: a stamp would make those stale for
    // every later opening. A raw socket is no connection. A listener's SYN-ACK belongs to none yet.
    if fields.type_ >= SOCK_RAW && fields.protocol != protocol::SCTP as u32
        || !matches!(fields.family, AF_INET | AF_INET6)
        || (fields.protocol == protocol::TCP as u32 && fields.state == LISTEN)
    {
        return Socket::None;
    }
    match load(socket) {
        Some(made) => Socket::Stamped(made),
        None if fields.protocol == protocol::TCP as u32 => Socket::UnstampedTcp,
        None => Socket::Unstamped,
    }
}

/// Stamps the socket that sends a packet. False: no memory for it (or no socket).
#[inline(always)]
pub(crate) fn stamp_sender(skb: *mut __sk_buff, now: u64) -> bool {
    match full_socket(skb) {
        Some(socket) => store(socket, now),
        None => false,
    }
}

#[inline(always)]
fn full_socket(skb: *mut __sk_buff) -> Option<*mut bpf_sock> {
    // SAFETY: the context is the program's own.
    let skb = unsafe { &*skb };
    // SAFETY: reading a pointer-sized union field that the verifier types.
    let socket = unsafe { skb.__bindgen_anon_2.sk };
    if socket.is_null() {
        return None;
    }
    // SAFETY: not null.
    let full = unsafe { bpf_sk_fullsock(socket) };
    (!full.is_null()).then_some(full)
}

#[inline(always)]
fn load(socket: *mut bpf_sock) -> Option<u64> {
    // SAFETY: the map lives as long as the program, the socket is not null.
    let stamp = unsafe { bpf_sk_storage_get((&raw const STAMPS).cast_mut().cast(), socket.cast(), ptr::null_mut(), 0) };
    if stamp.is_null() {
        return None;
    }
    // SAFETY: not null, and the map's values are aligned u64; another CPU may be storing the first one.
    Some(unsafe { stamp.cast::<u64>().read_volatile() })
}

/// Also over an older stamp: a socket whose connection failed may connect again, and has nothing left of before.
#[inline(always)]
fn stamp_anew(socket: *mut bpf_sock, now: u64) -> bool {
    let stamp = create(socket, now);
    if !stamp.is_null() {
        // SAFETY: not null, and the map's values are aligned u64.
        unsafe { stamp.write_volatile(now) };
    }
    !stamp.is_null()
}

#[inline(always)]
fn store(socket: *mut bpf_sock, now: u64) -> bool {
    !create(socket, now).is_null()
}

/// The socket's stamp, made with `now` if it has none. Null: no memory for it.
#[inline(always)]
fn create(socket: *mut bpf_sock, now: u64) -> *mut u64 {
    let mut stamp = now;
    // SAFETY: the map lives as long as the program, the socket is not null, the value is a u64 on our stack.
    let stored = unsafe {
        bpf_sk_storage_get(
            (&raw const STAMPS).cast_mut().cast(),
            socket.cast(),
            (&raw mut stamp).cast(),
            BPF_SK_STORAGE_GET_F_CREATE as u64,
        )
    };
    stored.cast()
}

#[inline(always)]
fn now() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_boot_ns() }
}
