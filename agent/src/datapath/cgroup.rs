//! The programs of the cgroup root: the backstop that knows no interface, and the stamping of sockets.

use std::{
    fs::File,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::PathBuf,
};

use portcullis_common::layout::programs;

use super::{
    DataPath, Direction,
    coverage::{CgroupCoverage, HookState},
    error::{DataPathError, chain},
    host,
    links::Attachment,
    programs::Copy,
    sys,
};
use crate::config::model::Agent;

const CGROUP: [Attachment; 2] = [Attachment::Cgroup(Direction::In), Attachment::Cgroup(Direction::Out)];

/// The cgroup whose programs are the backstop.
#[derive(Debug)]
pub(super) struct CgroupRoot {
    path: PathBuf,
    folder: File,
    inode: u64,
}

impl CgroupRoot {
    /// `Err` is the sentence for the status: the host is covered by its interfaces alone.
    pub(super) fn open(agent: &Agent) -> Result<Self, String> {
        let path = match &agent.cgroup_root {
            Some(path) => path.clone(),
            None => host::cgroup_root()
                .map_err(|error| format!("the mounts cannot be read ({error}): set `cgroup_root`"))?
                .ok_or("cgroup v2 is not mounted: mount it (`mount -t cgroup2 none /sys/fs/cgroup/unified`)")?,
        };
        let opened = File::open(&path).and_then(|folder| Ok((folder.metadata()?.ino(), folder)));
        let (inode, folder) =
            opened.map_err(|error| format!("the cgroup {} cannot be opened: {error}", path.display()))?;
        Ok(Self { path, folder, inode })
    }
}

impl DataPath {
    /// Attaches the programs of the cgroup root: the stamping of sockets always, the backstop while armed.
    pub(super) fn cover_cgroup(&mut self) -> (CgroupCoverage, Vec<String>) {
        let mut mended = Vec::new();
        let mut cover = |attachment, name| {
            let covered = self.cover_cgroup_hook(attachment, name);
            let (state, attached) =
                covered.unwrap_or_else(|error| (HookState::Missing { reason: chain(&error) }, false));
            if attached {
                mended.push(format!("{name} was missing from the cgroup root and is attached again"));
            }
            state
        };
        let ingress = cover(CGROUP[0], programs::CGROUP_IN);
        let egress = cover(CGROUP[1], programs::CGROUP_OUT);
        let sockets = cover(Attachment::Sockets, programs::SOCKETS);
        let path = self.cgroup.as_ref().ok().map(|root| root.path.clone());
        (CgroupCoverage { path, ingress, egress, sockets }, mended)
    }

    fn cover_cgroup_hook(
        &mut self,
        attachment: Attachment,
        name: &'static str,
    ) -> Result<(HookState, bool), DataPathError> {
        let root = match &self.cgroup {
            Ok(root) => root,
            Err(reason) => return Ok((HookState::Missing { reason: reason.clone() }, false)),
        };
        if !self.armed && attachment != Attachment::Sockets {
            return Ok((HookState::NotArmed, false));
        }
        if self.links.cgroup(attachment) == Some(root.inode) {
            return Ok((HookState::First, self.links.repin(attachment)?));
        }
        let program = self.programs.fd(Copy::Main, name)?;
        match sys::link_create_cgroup(program, root.folder.as_fd(), attachment.attach_type()) {
            Ok(link) => {
                self.links.insert(attachment, link, Copy::Main)?;
                Ok((HookState::First, true))
            }
            Err(error) => {
                let reason = match error.raw_os_error() {
                    Some(libc::EPERM) => format!(
                        "a foreign program holds {} without allowing others beside it (BPF_F_ALLOW_MULTI), or the agent \
                         lacks CAP_NET_ADMIN",
                        root.path.display()
                    ),
                    _ => error.to_string(),
                };
                Ok((HookState::Missing { reason }, false))
            }
        }
    }

    /// Detaches the backstop; the stamping of sockets stays.
    pub(super) fn uncover_cgroup(&mut self) -> Result<(), DataPathError> {
        CGROUP.into_iter().try_for_each(|attachment| self.links.remove(attachment))
    }
}
