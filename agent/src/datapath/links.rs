//! The pinned links: what keeps the programs attached when nobody is alive.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use super::{
    Direction,
    error::DataPathError,
    programs::Copy,
    sys::{self, AttachType, LinkTarget, ObjectKind},
};
use crate::crash;

/// Added to the name of a link that is about to take another's place.
const NEXT: &str = "-next";

/// What a link attaches to. Its pin is named after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Attachment {
    Tcx(Direction, u32),
    Xdp(u32),
    Cgroup(Direction),
    Sockets,
}

impl Attachment {
    fn pin_name(self) -> String {
        match self {
            Self::Tcx(Direction::In, index) => format!("tcx-in-{index}"),
            Self::Tcx(Direction::Out, index) => format!("tcx-out-{index}"),
            Self::Xdp(index) => format!("xdp-{index}"),
            Self::Cgroup(Direction::In) => "cg-in".to_owned(),
            Self::Cgroup(Direction::Out) => "cg-out".to_owned(),
            Self::Sockets => "sock-ops".to_owned(),
        }
    }

    fn parse(name: &str) -> Option<Self> {
        let index = |text: &str| text.parse().ok();
        match name {
            "cg-in" => Some(Self::Cgroup(Direction::In)),
            "cg-out" => Some(Self::Cgroup(Direction::Out)),
            "sock-ops" => Some(Self::Sockets),
            _ => match name.rsplit_once('-')? {
                ("tcx-in", number) => index(number).map(|index| Self::Tcx(Direction::In, index)),
                ("tcx-out", number) => index(number).map(|index| Self::Tcx(Direction::Out, index)),
                ("xdp", number) => index(number).map(Self::Xdp),
                _ => None,
            },
        }
    }

    pub(super) const fn attach_type(self) -> AttachType {
        match self {
            Self::Tcx(Direction::In, _) => AttachType::TcxIngress,
            Self::Tcx(Direction::Out, _) => AttachType::TcxEgress,
            Self::Xdp(_) => AttachType::Xdp,
            Self::Cgroup(Direction::In) => AttachType::CgroupIngress,
            Self::Cgroup(Direction::Out) => AttachType::CgroupEgress,
            Self::Sockets => AttachType::CgroupSockOps,
        }
    }

    pub(super) const fn interface(self) -> Option<u32> {
        match self {
            Self::Tcx(_, index) | Self::Xdp(index) => Some(index),
            Self::Cgroup(_) | Self::Sockets => None,
        }
    }
}

/// How a link stands to what it is named after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Attached,
    /// Its device or cgroup is gone, or has moved to another namespace under another number.
    Dead,
    /// Not a link of this kind at all.
    Foreign,
}

fn standing(attachment: Attachment, target: LinkTarget) -> Standing {
    let alive = |is: bool| if is { Standing::Attached } else { Standing::Dead };
    match (attachment, target) {
        (Attachment::Tcx(_, index), LinkTarget::Tcx(found, kind)) if kind == attachment.attach_type() as u32 => {
            alive(found == index)
        }
        (Attachment::Xdp(index), LinkTarget::Xdp(found)) => alive(found == index),
        (Attachment::Cgroup(_) | Attachment::Sockets, LinkTarget::Cgroup(folder, kind))
            if kind == attachment.attach_type() as u32 =>
        {
            alive(folder != 0)
        }
        (
            Attachment::Tcx(..) | Attachment::Xdp(_) | Attachment::Cgroup(_) | Attachment::Sockets,
            LinkTarget::Tcx(..) | LinkTarget::Xdp(_) | LinkTarget::Cgroup(..) | LinkTarget::Other(_),
        ) => Standing::Foreign,
    }
}

#[derive(Debug)]
struct Held {
    fd: OwnedFd,
    id: u32,
    copy: Copy,
}

/// Every link of ours, pinned in one folder.
#[derive(Debug)]
pub(super) struct Links {
    folder: PathBuf,
    held: BTreeMap<Attachment, Held>,
}

/// Whether any link of ours is pinned.
pub(super) fn any_pinned(folder: &Path) -> Result<bool, DataPathError> {
    Ok(!names(folder)?.is_empty())
}

/// Detaches every link that is pinned in a folder, whoever pinned it there.
pub(super) fn detach_all(folder: &Path) -> Result<(), DataPathError> {
    for name in names(folder)? {
        let path = folder.join(name);
        match sys::open_pin(&path) {
            Ok((link, ObjectKind::Link)) => sys::link_detach(link.as_fd()),
            Ok((_, ObjectKind::Map | ObjectKind::Program | ObjectKind::Other)) => {}
            Err(source) => return Err(DataPathError::Pin { operation: "open", path, source }),
        }
    }
    Ok(())
}

fn names(folder: &Path) -> Result<Vec<String>, DataPathError> {
    let failed = |source| DataPathError::Pin { operation: "read the folder", path: folder.to_owned(), source };
    let entries = std::fs::read_dir(folder).map_err(failed)?;
    let names = entries.map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<io::Result<Vec<_>>>().map_err(failed)?;
    // A name without `-next` sorts before the one with it.
    names.sort();
    Ok(names)
}

impl Links {
    /// Adopts every pinned link. All are looked at before the first change: finishing a move that was cut short, and
    /// removing the pins of devices that are gone.
    pub(super) fn adopt(folder: &Path) -> Result<Self, DataPathError> {
        let mut found = Vec::new();
        for name in names(folder)? {
            let path = folder.join(&name);
            let foreign = |reason: &str| DataPathError::ForeignPin { path: path.clone(), reason: reason.to_owned() };
            let attachment = Attachment::parse(name.strip_suffix(NEXT).unwrap_or(&name));
            let attachment = attachment.ok_or_else(|| foreign("no link of this agent has such a name"))?;
            let failed = |source| DataPathError::Pin { operation: "open", path: path.clone(), source };
            let (fd, kind) = sys::open_pin(&path).map_err(failed)?;
            if kind != ObjectKind::Link {
                return Err(foreign(&format!("it is a {kind:?}, not a link")));
            }
            let info = sys::link_info(fd.as_fd()).map_err(failed)?;
            let standing = standing(attachment, info.target);
            if standing == Standing::Foreign {
                return Err(foreign("it is a link of another kind than its name says"));
            }
            found.push((attachment, path, standing, Held { fd, id: info.id, copy: Copy::Main }));
        }
        let mut links = Self { folder: folder.to_owned(), held: BTreeMap::new() };
        for (attachment, path, standing, held) in found {
            let place = folder.join(attachment.pin_name());
            if standing == Standing::Dead {
                unlink(&path)?;
                continue;
            }
            if path != place {
                rename(&path, &place)?;
            }
            links.held.insert(attachment, held);
        }
        Ok(links)
    }

    pub(super) fn attachments(&self) -> Vec<Attachment> {
        self.held.keys().copied().collect()
    }

    /// The kernel's number of a link, and the copy of the program behind it.
    pub(super) fn get(&self, attachment: Attachment) -> Option<(u32, Copy)> {
        self.held.get(&attachment).map(|held| (held.id, held.copy))
    }

    pub(super) fn path(&self, attachment: Attachment) -> PathBuf {
        self.folder.join(attachment.pin_name())
    }

    /// The inode of the folder of the cgroup that a link is attached to; 0 once it is removed.
    pub(super) fn cgroup(&self, attachment: Attachment) -> Option<u64> {
        match sys::link_info(self.held.get(&attachment)?.fd.as_fd()).ok()?.target {
            LinkTarget::Cgroup(folder, _) => Some(folder),
            LinkTarget::Xdp(_) | LinkTarget::Tcx(..) | LinkTarget::Other(_) => None,
        }
    }

    /// Whether the link still attaches to what it is named after.
    pub(super) fn is_alive(&self, attachment: Attachment) -> bool {
        self.held
            .get(&attachment)
            .and_then(|held| sys::link_info(held.fd.as_fd()).ok())
            .is_some_and(|info| standing(attachment, info.target) == Standing::Attached)
    }

    /// Replaces the program behind a link by its main copy. `Ok(false)`: there is no such link, or its device is gone.
    pub(super) fn update(&mut self, attachment: Attachment, program: BorrowedFd<'_>) -> io::Result<bool> {
        let Some(held) = self.held.get_mut(&attachment) else { return Ok(false) };
        match sys::link_update(held.fd.as_fd(), program) {
            Ok(()) => {
                held.copy = Copy::Main;
                Ok(true)
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOLINK) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Pins a new link, in the place of the old one if there is one; only then the old one is let go.
    pub(super) fn insert(&mut self, attachment: Attachment, link: OwnedFd, copy: Copy) -> Result<(), DataPathError> {
        let place = self.path(attachment);
        let failed = |path: &Path, operation| {
            let path = path.to_owned();
            move |source| DataPathError::Pin { operation, path, source }
        };
        let id = sys::link_info(link.as_fd()).map_err(failed(&place, "read the link"))?.id;
        crash::point("link-before-pin");
        if self.held.contains_key(&attachment) {
            let next = self.folder.join(attachment.pin_name() + NEXT);
            sys::pin(link.as_fd(), &next).map_err(failed(&next, "pin"))?;
            crash::point("link-before-rename");
            rename(&next, &place)?;
        } else {
            sys::pin(link.as_fd(), &place).map_err(failed(&place, "pin"))?;
        }
        crash::point("link-after-pin");
        if let Some(old) = self.held.insert(attachment, Held { fd: link, id, copy }) {
            sys::link_detach(old.fd.as_fd());
        }
        Ok(())
    }

    /// Pins a link again whose pin was deleted while we held it: with us it would have gone. True if that was so.
    pub(super) fn repin(&self, attachment: Attachment) -> Result<bool, DataPathError> {
        let path = self.path(attachment);
        match self.held.get(&attachment) {
            Some(held) if !path.exists() => {
                sys::pin(held.fd.as_fd(), &path).map_err(|source| DataPathError::Pin {
                    operation: "pin",
                    path,
                    source,
                })?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Unpins and so detaches. Nothing happens if there is no such link.
    pub(super) fn remove(&mut self, attachment: Attachment) -> Result<(), DataPathError> {
        match self.held.remove(&attachment) {
            Some(held) => {
                unlink(&self.path(attachment))?;
                sys::link_detach(held.fd.as_fd());
                Ok(())
            }
            None => Ok(()),
        }
    }
}

fn unlink(path: &Path) -> Result<(), DataPathError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(|source| DataPathError::Pin { operation: "unpin", path: path.to_owned(), source }),
    }
}

fn rename(from: &Path, to: &Path) -> Result<(), DataPathError> {
    std::fs::rename(from, to).map_err(|source| DataPathError::Pin { operation: "move", path: from.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_back_and_hold_no_dot() {
        for attachment in [
            Attachment::Tcx(Direction::In, 3),
            Attachment::Tcx(Direction::Out, 40_000),
            Attachment::Xdp(1),
            Attachment::Cgroup(Direction::In),
            Attachment::Cgroup(Direction::Out),
            Attachment::Sockets,
        ] {
            let name = attachment.pin_name();
            assert_eq!(Attachment::parse(&name), Some(attachment));
            assert!(!name.contains('.'));
        }
        for name in ["", "tcx-in-", "tcx-in-x", "tcx-3", "xdp-3-next", "cg"] {
            assert_eq!(Attachment::parse(name), None, "{name}");
        }
    }
}
