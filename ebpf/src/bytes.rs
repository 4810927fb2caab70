//! The three ways to a packet's bytes. Direct access is an order of magnitude cheaper than a helper, but sees only the
//! linear part of a packet; the callers parse again through a helper what direct access left undecided.

use aya_ebpf::{
    bindings::{__sk_buff, bpf_hdr_start_off::BPF_HDR_START_NET, xdp_md},
    helpers::{bpf_skb_load_bytes, bpf_skb_load_bytes_relative, bpf_xdp_load_bytes},
};
use portcullis_common::packet::Bytes;

/// The linear part, from `data` to `data_end`.
pub(crate) struct Direct {
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl Bytes for Direct {
    // Every further level multiplies the verifier's work; what has more is parsed again through a helper.
    const VLAN_TAGS: usize = 1;
    const EXTENSION_HEADERS: usize = 1;

    #[inline(always)]
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let at = self.start + offset;
        if at + N > self.end {
            return None;
        }
        // SAFETY: the verifier proves that `start` and `end` bound the packet, and the line above that `at` to `at + N`
        // lies between them; a byte array has no alignment.
        Some(unsafe { *(at as *const [u8; N]) })
    }
}

/// A whole frame, from its link-layer header, through a helper.
pub(crate) struct Frame(pub(crate) *mut __sk_buff);

impl Bytes for Frame {
    #[inline(always)]
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        // SAFETY: the context is the program's own, and `bytes` is `N` bytes long.
        let result = unsafe { bpf_skb_load_bytes(self.0.cast(), offset as u32, bytes.as_mut_ptr().cast(), N as u32) };
        (result == 0).then_some(bytes)
    }
}

/// A whole packet, from its network header, whatever stands before it.
pub(crate) struct Network(pub(crate) *mut __sk_buff);

impl Bytes for Network {
    #[inline(always)]
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        // SAFETY: the context is the program's own, and `bytes` is `N` bytes long.
        let result = unsafe {
            bpf_skb_load_bytes_relative(
                self.0.cast(),
                offset as u32,
                bytes.as_mut_ptr().cast(),
                N as u32,
                BPF_HDR_START_NET,
            )
        };
        (result == 0).then_some(bytes)
    }
}

/// A whole multi-buffer XDP frame, through a helper of 5.18.
pub(crate) struct Fragments(pub(crate) *mut xdp_md);

impl Bytes for Fragments {
    #[inline(always)]
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        // SAFETY: the context is the program's own, and `bytes` is `N` bytes long.
        let result = unsafe { bpf_xdp_load_bytes(self.0, offset as u32, bytes.as_mut_ptr().cast(), N as u32) };
        (result == 0).then_some(bytes)
    }
}
