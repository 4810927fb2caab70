//! The kernel programs. Each fetches bytes and map values for [`portcullis_common`], which decides.
//!
//! Every entry is a tail expression: what cannot be decided was already turned into a drop by the verdict, so no path
//! computes a verdict and loses it.
#![no_std]
#![no_main]
// Unaligned loads, see `bytes`.
#![feature(asm_experimental_arch)]

#[cfg(feature = "bench")]
mod bench;
mod bytes;
mod maps;
mod packets;
mod sockets;

use aya_ebpf::{
    EbpfContext,
    bindings::{TC_ACT_SHOT, xdp_action},
    macros::{cgroup_skb, classifier, sock_ops, xdp},
    programs::{SkBuffContext, SockOpsContext, TcContext, XdpContext},
};
use portcullis_common::{layout::Hook, verdict::Verdict};

/// Let the next program, or the stack, decide. Unlike `TC_ACT_OK` it hides nothing from programs behind ours.
const TC_NEXT: i32 = -1;
/// A cgroup_skb program's answers.
const CGROUP_PASS: i32 = 1;
const CGROUP_DROP: i32 = 0;

#[xdp(frags)]
pub fn gate_xdp_frags(context: XdpContext) -> u32 {
    xdp_action(told(&context, packets::judge_xdp_fragments(&context)))
}

#[xdp]
pub fn gate_xdp(context: XdpContext) -> u32 {
    xdp_action(told(&context, packets::judge_xdp(&context)))
}

#[classifier]
pub fn gate_tc_in(context: TcContext) -> i32 {
    tc_action(told(&context, packets::judge_frame(context.as_ptr().cast(), Hook::TcIn)))
}

#[classifier]
pub fn gate_tc_out(context: TcContext) -> i32 {
    tc_action(told(&context, packets::judge_frame(context.as_ptr().cast(), Hook::TcOut)))
}

#[classifier]
pub fn gate_tc_l3_in(context: TcContext) -> i32 {
    tc_action(told(&context, packets::judge_network(context.as_ptr().cast(), Hook::TcIn)))
}

#[classifier]
pub fn gate_tc_l3_out(context: TcContext) -> i32 {
    tc_action(told(&context, packets::judge_network(context.as_ptr().cast(), Hook::TcOut)))
}

#[cgroup_skb(ingress)]
pub fn gate_cg_in(context: SkBuffContext) -> i32 {
    cgroup_action(told(&context, packets::judge_cgroup(context.as_ptr().cast(), Hook::CgroupIn)))
}

#[cgroup_skb(egress)]
pub fn gate_cg_out(context: SkBuffContext) -> i32 {
    cgroup_action(told(&context, packets::judge_cgroup(context.as_ptr().cast(), Hook::CgroupOut)))
}

#[sock_ops]
pub fn stamp_sockets(context: SockOpsContext) -> u32 {
    sockets::stamp_connection(&context);
    1
}

/// With the feature `log`: tells of each drop through aya-log. Else nothing.
#[inline(always)]
fn told<C: EbpfContext>(context: &C, verdict: Verdict) -> Verdict {
    #[cfg(feature = "log")]
    if matches!(verdict, Verdict::Drop) {
        aya_log_ebpf::info!(context, "dropped a packet");
    }
    #[cfg(not(feature = "log"))]
    let _ = context;
    verdict
}

fn xdp_action(verdict: Verdict) -> u32 {
    match verdict {
        Verdict::Foreign | Verdict::Pass => xdp_action::XDP_PASS,
        Verdict::Drop => xdp_action::XDP_DROP,
    }
}

fn tc_action(verdict: Verdict) -> i32 {
    match verdict {
        Verdict::Foreign | Verdict::Pass => TC_NEXT,
        Verdict::Drop => TC_ACT_SHOT,
    }
}

fn cgroup_action(verdict: Verdict) -> i32 {
    match verdict {
        Verdict::Foreign | Verdict::Pass => CGROUP_PASS,
        Verdict::Drop => CGROUP_DROP,
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // The verifier refuses a program that can reach this.
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
