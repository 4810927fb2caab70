//! The three ways to a packet's bytes. Direct access is an order of magnitude cheaper than a helper, but sees only the
//! linear part of a packet; the callers parse again through a helper what direct access left undecided.

use core::arch::asm;

use aya_ebpf::{
    bindings::{__sk_buff, bpf_hdr_start_off::BPF_HDR_START_NET, xdp_md},
    helpers::{bpf_skb_load_bytes, bpf_skb_load_bytes_relative, bpf_xdp_load_bytes},
};
use portcullis_common::packet::{Bytes, Header};

/// The linear part, from `data` to `data_end`.
pub(crate) struct Direct {
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl Bytes for Direct {
    // Every further level multiplies the verifier's work; what has more is parsed again through a helper.
    const VLAN_TAGS: usize = 1;
    const EXTENSION_HEADERS: usize = 1;

    type Header<const N: usize> = InPlace<N>;

    #[inline(always)]
    fn header<const N: usize>(&self, offset: usize) -> Option<InPlace<N>> {
        let at = self.start + offset;
        (at + N <= self.end).then_some(InPlace(at))
    }
}

/// `N` bytes of the packet itself; made by [`Direct`] alone, behind its check of the bound.
#[derive(Clone, Copy)]
pub(crate) struct InPlace<const N: usize>(usize);

impl<const N: usize> InPlace<N> {
    /// Where `size` bytes at `index` stand.
    #[inline(always)]
    fn at(self, index: usize, size: usize) -> usize {
        if index + size > N {
            // Every index is a constant: this is gone, or the program does not load.
            panic!()
        }
        self.0 + index
    }
}

// Headers are not aligned, and for an unaligned number the compiler would load byte by byte. The processors that aya
// supports load it at once, and the verifier knows which those are; so the load is spelt out.
impl<const N: usize> Header for InPlace<N> {
    #[inline(always)]
    fn byte(&self, index: usize) -> u8 {
        let at = self.at(index, 1) as *const u8;
        // SAFETY: within the bound that `Direct` checked.
        unsafe { *at }
    }

    #[inline(always)]
    fn short(&self, index: usize) -> u16 {
        let value: u64;
        // SAFETY: within the bound that `Direct` checked; reads two bytes, writes the register alone.
        unsafe {
            asm!("{value} = *(u16 *)({at} + 0)", at = in(reg) self.at(index, 2), value = out(reg) value,
                options(pure, readonly, nostack, preserves_flags))
        }
        u16::from_be(value as u16)
    }

    #[inline(always)]
    fn word(&self, index: usize) -> u32 {
        let value: u64;
        // SAFETY: within the bound that `Direct` checked; reads four bytes, writes the register alone.
        unsafe {
            asm!("{value} = *(u32 *)({at} + 0)", at = in(reg) self.at(index, 4), value = out(reg) value,
                options(pure, readonly, nostack, preserves_flags))
        }
        value as u32
    }

    #[inline(always)]
    fn long(&self, index: usize) -> u64 {
        let value: u64;
        // SAFETY: within the bound that `Direct` checked; reads eight bytes, writes the register alone.
        unsafe {
            asm!("{value} = *(u64 *)({at} + 0)", at = in(reg) self.at(index, 8), value = out(reg) value,
                options(pure, readonly, nostack, preserves_flags))
        }
        value
    }
}

/// A whole frame, from its link-layer header, through a helper.
pub(crate) struct Frame(pub(crate) *mut __sk_buff);

impl Bytes for Frame {
    type Header<const N: usize> = [u8; N];

    #[inline(always)]
    fn header<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        // SAFETY: the context is the program's own, and `bytes` is `N` bytes long.
        let result = unsafe { bpf_skb_load_bytes(self.0.cast(), offset as u32, bytes.as_mut_ptr().cast(), N as u32) };
        (result == 0).then_some(bytes)
    }
}

/// A whole packet, from its network header, whatever stands before it.
pub(crate) struct Network(pub(crate) *mut __sk_buff);

impl Bytes for Network {
    type Header<const N: usize> = [u8; N];

    #[inline(always)]
    fn header<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
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
    type Header<const N: usize> = [u8; N];

    #[inline(always)]
    fn header<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        // SAFETY: the context is the program's own, and `bytes` is `N` bytes long.
        let result = unsafe { bpf_xdp_load_bytes(self.0, offset as u32, bytes.as_mut_ptr().cast(), N as u32) };
        (result == 0).then_some(bytes)
    }
}
