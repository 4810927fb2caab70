//! Classifiers below 6.6, where TCX is missing: filters on the clsact qdisc, by route netlink.
//!
//! Such a filter cannot be pinned and needs no pin: it stays until somebody deletes it. A fixed priority and two fixed
//! handles make it findable.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use super::{
    Direction,
    netlink::{Netlink, attributes, push_attribute, text, word},
};

const RTM_NEWQDISC: u16 = 36;
const RTM_NEWTFILTER: u16 = 44;
const RTM_DELTFILTER: u16 = 45;
const RTM_GETTFILTER: u16 = 46;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
/// `struct tcmsg`: family, padding, interface, handle, parent, info.
const TCMSG: usize = 20;
const CLSACT: u32 = 0xffff_0000;
const CLSACT_PARENT: u32 = 0xffff_fff1;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_ID: u16 = 11;
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;
const PRIORITY: u32 = 1;
/// Ours. A filter runs before those that were there at the same priority, so ours moves to the front by taking the other
/// handle before it leaves the first.
const HANDLES: [u32; 2] = [0x504f_5254, 0x504f_5255];

/// One filter, in the order in which they run.
#[derive(Debug)]
struct Filter {
    handle: u32,
    priority: u32,
    program: u32,
    name: String,
}

impl Filter {
    fn is_ours(&self) -> bool {
        self.priority == PRIORITY && HANDLES.contains(&self.handle)
    }
}

/// What had to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It was as it has to be.
    Kept,
    /// It was not attached.
    Attached,
    /// These ran before it.
    Overtook(Vec<String>),
}

/// Makes `program` the first filter of a hook.
pub(super) fn ensure(
    netlink: &mut Netlink,
    interface: u32,
    direction: Direction,
    program: BorrowedFd<'_>,
    id: u32,
    name: &str,
) -> io::Result<Outcome> {
    let filters = list(netlink, interface, direction)?;
    let Some(at) = filters.iter().position(Filter::is_ours) else {
        add_qdisc(netlink, interface)?;
        put(netlink, interface, direction, HANDLES[0], program, name)?;
        return Ok(Outcome::Attached);
    };
    let handle = filters[at].handle;
    if at > 0 {
        let other = HANDLES[usize::from(handle == HANDLES[0])];
        put(netlink, interface, direction, other, program, name)?;
        delete(netlink, interface, direction, handle)?;
        return Ok(Outcome::Overtook(filters[..at].iter().map(|filter| filter.name.clone()).collect()));
    }
    // Left over from a move that was cut short: only the first is needed.
    for left in filters[at + 1..].iter().filter(|filter| filter.is_ours()) {
        delete(netlink, interface, direction, left.handle)?;
    }
    if filters[at].program == id {
        return Ok(Outcome::Kept);
    }
    put(netlink, interface, direction, handle, program, name)?;
    Ok(Outcome::Attached)
}

/// Whether a filter of ours is there.
pub(super) fn is_attached(netlink: &mut Netlink, interface: u32, direction: Direction) -> io::Result<bool> {
    Ok(list(netlink, interface, direction)?.iter().any(Filter::is_ours))
}

/// Removes our filters; the qdisc stays, since others may use it.
pub(super) fn remove(netlink: &mut Netlink, interface: u32, direction: Direction) -> io::Result<()> {
    for filter in list(netlink, interface, direction)?.iter().filter(|filter| filter.is_ours()) {
        delete(netlink, interface, direction, filter.handle)?;
    }
    Ok(())
}

fn list(netlink: &mut Netlink, interface: u32, direction: Direction) -> io::Result<Vec<Filter>> {
    let answers = netlink.dump(RTM_GETTFILTER, &tcmsg(interface, 0, parent(direction), 0))?;
    Ok(answers
        .iter()
        .filter_map(|answer| {
            let (handle, info) = (word(&answer.body, 8)?, word(&answer.body, 16)?);
            let (mut kind, mut name, mut program) = (String::new(), None, 0);
            for (number, value) in attributes(answer.body.get(TCMSG..)?) {
                match number {
                    TCA_KIND => kind = text(value),
                    TCA_OPTIONS => {
                        for (number, value) in attributes(value) {
                            match number {
                                TCA_BPF_NAME => name = Some(text(value)),
                                TCA_BPF_ID => program = word(value, 0).unwrap_or(0),
                                _ => {}
                            }
                        }
                    }
                    _ => {}
                }
            }
            // A classifier is listed once by itself, without a handle, before its filters.
            (handle != 0).then(|| Filter { handle, priority: info >> 16, program, name: name.unwrap_or(kind) })
        })
        .collect())
}

fn add_qdisc(netlink: &mut Netlink, interface: u32) -> io::Result<()> {
    let mut body = tcmsg(interface, CLSACT, CLSACT_PARENT, 0);
    push_attribute(&mut body, TCA_KIND, b"clsact\0");
    match netlink.request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, &body) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        other => other,
    }
}

/// Adds the filter, or replaces the program behind it in one step.
fn put(
    netlink: &mut Netlink,
    interface: u32,
    direction: Direction,
    handle: u32,
    program: BorrowedFd<'_>,
    name: &str,
) -> io::Result<()> {
    let mut options = Vec::new();
    push_attribute(&mut options, TCA_BPF_FD, &program.as_raw_fd().to_ne_bytes());
    push_attribute(&mut options, TCA_BPF_NAME, format!("{name}\0").as_bytes());
    push_attribute(&mut options, TCA_BPF_FLAGS, &TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes());
    let mut body = tcmsg(interface, handle, parent(direction), info());
    push_attribute(&mut body, TCA_KIND, b"bpf\0");
    push_attribute(&mut body, TCA_OPTIONS, &options);
    netlink.request(RTM_NEWTFILTER, NLM_F_CREATE, &body)
}

fn delete(netlink: &mut Netlink, interface: u32, direction: Direction, handle: u32) -> io::Result<()> {
    netlink.request(RTM_DELTFILTER, 0, &tcmsg(interface, handle, parent(direction), info()))
}

const fn parent(direction: Direction) -> u32 {
    match direction {
        Direction::In => CLSACT | 0xfff2,
        Direction::Out => CLSACT | 0xfff3,
    }
}

/// Priority and `ETH_P_ALL` in network byte order.
const fn info() -> u32 {
    PRIORITY << 16 | 0x0003_u16.to_be() as u32
}

fn tcmsg(interface: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    let words = [0, interface, handle, parent, info];
    words.into_iter().flat_map(u32::to_ne_bytes).collect()
}
