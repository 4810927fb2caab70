//! Attaching to interfaces, and mending what came loose.

use portcullis_common::layout::programs;

use super::{
    DataPath, Direction, TcFlavour,
    clsact::{self, Outcome},
    coverage::{Coverage, HookState, InterfaceCoverage, XdpState},
    error::{DataPathError, chain},
    interfaces::{Interface, InterfaceKind, XdpAttached, matches},
    links::Attachment,
    programs::Copy,
    sys::{self, link_flags},
};
use crate::{config::model::Xdp, crash};

const fn classifier(direction: Direction, kind: &InterfaceKind) -> &'static str {
    match (direction, kind.is_ethernet()) {
        (Direction::In, true) => programs::TC_IN,
        (Direction::Out, true) => programs::TC_OUT,
        (Direction::In, false) => programs::TC_L3_IN,
        (Direction::Out, false) => programs::TC_L3_OUT,
    }
}

impl DataPath {
    /// Puts the freshly loaded programs behind every adopted link. No packet passes unjudged meanwhile.
    pub(super) fn swap_adopted(&mut self) -> Result<(), DataPathError> {
        for attachment in self.links.attachments() {
            let names = match attachment {
                Attachment::Tcx(direction, index) => {
                    let interface = self.interfaces.known().iter().find(|one| one.index == index);
                    match interface {
                        Some(interface) => vec![classifier(direction, &interface.kind)],
                        None => Vec::new(),
                    }
                }
                Attachment::Xdp(_) => self.programs.xdp_names().to_vec(),
                Attachment::Cgroup(Direction::In) => vec![programs::CGROUP_IN],
                Attachment::Cgroup(Direction::Out) => vec![programs::CGROUP_OUT],
                Attachment::Sockets => vec![programs::SOCKETS],
            };
            let mut swapped = Ok(false);
            for name in names {
                swapped = self.links.update(attachment, self.programs.fd(Copy::Main, name)?);
                if swapped.is_ok() {
                    break;
                }
            }
            let path = self.links.path(attachment);
            if !swapped.map_err(|source| DataPathError::Pin { operation: "swap the program behind", path, source })? {
                self.links.remove(attachment)?;
            }
            crash::point("adopt-after-swap");
        }
        Ok(())
    }

    /// Attaches the classifiers to an interface, or detaches them if it is excluded. A failure is this interface's alone:
    /// it may have gone in between, and the others are still to be covered.
    pub(super) fn cover(&mut self, interface: &Interface) -> [(HookState, Outcome); 2] {
        [Direction::In, Direction::Out].map(|direction| {
            self.cover_hook(interface, direction)
                .unwrap_or_else(|error| (HookState::Missing { reason: chain(&error) }, Outcome::Kept))
        })
    }

    fn cover_hook(
        &mut self,
        interface: &Interface,
        direction: Direction,
    ) -> Result<(HookState, Outcome), DataPathError> {
        if self.is_excluded(&interface.name) {
            self.uncover_hook(interface.index, direction)?;
            return Ok((HookState::Excluded, Outcome::Kept));
        }
        if !self.armed {
            return Ok((HookState::NotArmed, Outcome::Kept));
        }
        Ok(match self.flavour {
            TcFlavour::Tcx => (HookState::First, self.ensure_tcx(interface, direction)?),
            TcFlavour::Clsact => (HookState::Clsact, self.ensure_clsact(interface, direction)?),
        })
    }

    fn ensure_tcx(&mut self, interface: &Interface, direction: Direction) -> Result<Outcome, DataPathError> {
        let attachment = Attachment::Tcx(direction, interface.index);
        let name = classifier(direction, &interface.kind);
        let failed = |operation| move |source| DataPathError::Netlink { operation, source };
        let order =
            sys::tcx_query(interface.index, attachment.attach_type()).map_err(failed("list the programs of a hook"))?;
        let held = self.links.get(attachment);
        let at = held.and_then(|(id, _)| order.iter().position(|entry| entry.link == id));
        if at == Some(0) {
            return Ok(if self.links.repin(attachment)? { Outcome::Attached } else { Outcome::Kept });
        }
        // Never detach before attach: the second link stands before the first is let go.
        let copy = held.filter(|_| at.is_some()).map_or(Copy::Main, |(_, copy)| copy.other());
        let program = self.programs.fd(copy, name)?;
        let link = sys::link_create(program, interface.index, attachment.attach_type(), link_flags::FIRST)
            .map_err(failed("attach a classifier"))?;
        crash::point("tcx-after-attach");
        self.links.insert(attachment, link, copy)?;
        Ok(match at {
            Some(at) => {
                let names = order[..at].iter().map(|entry| sys::program_name(entry.program));
                Outcome::Overtook(names.map(|name| name.unwrap_or_else(|_| "unknown".to_owned())).collect())
            }
            None => Outcome::Attached,
        })
    }

    fn ensure_clsact(&mut self, interface: &Interface, direction: Direction) -> Result<Outcome, DataPathError> {
        let name = classifier(direction, &interface.kind);
        let id = self.programs.id(name)?;
        let program = self.programs.fd(Copy::Main, name)?;
        clsact::ensure(&mut self.netlink, interface.index, direction, program, id, name)
            .map_err(|source| DataPathError::Netlink { operation: "attach a clsact filter", source })
    }

    /// After `tc` was changed in the configuration: lets go of the old attachment once the new one is in place.
    pub(super) fn leave_other_flavour(&mut self, interface: &Interface) -> Result<(), DataPathError> {
        for direction in [Direction::In, Direction::Out] {
            let tcx = Attachment::Tcx(direction, interface.index);
            match self.flavour {
                TcFlavour::Tcx if self.links.get(tcx).is_some() => self.remove_filters(interface.index, direction)?,
                TcFlavour::Clsact
                    if clsact::is_attached(&mut self.netlink, interface.index, direction).unwrap_or(false) =>
                {
                    self.links.remove(tcx)?;
                }
                TcFlavour::Tcx | TcFlavour::Clsact => {}
            }
        }
        Ok(())
    }

    fn uncover_hook(&mut self, index: u32, direction: Direction) -> Result<(), DataPathError> {
        self.links.remove(Attachment::Tcx(direction, index))?;
        self.remove_filters(index, direction)
    }

    fn remove_filters(&mut self, index: u32, direction: Direction) -> Result<(), DataPathError> {
        match clsact::remove(&mut self.netlink, index, direction) {
            // The device has gone, and the filter with it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EINVAL | libc::ENOENT)) => Ok(()),
            other => {
                other.map_err(|source| DataPathError::Netlink { operation: "remove a clsact filter of ours", source })
            }
        }
    }

    pub(super) fn uncover(&mut self, index: u32) -> Result<(), DataPathError> {
        self.uncover_hook(index, Direction::In)?;
        self.uncover_hook(index, Direction::Out)
    }

    /// Forgets an interface that is gone: its links are dead, only their pins are left.
    pub(super) fn forget(&mut self, index: u32) -> Result<(), DataPathError> {
        self.xdp.remove(&index);
        for attachment in self.links.attachments() {
            if attachment.interface() == Some(index) {
                self.links.remove(attachment)?;
            }
        }
        Ok(())
    }

    pub(super) fn is_excluded(&self, name: &str) -> bool {
        self.exclude.iter().any(|pattern| matches(pattern, name))
    }

    /// Whether anything of ours is attached that a start with `attach = "on-fence"` would not attach.
    pub(super) fn has_classifiers(&mut self) -> bool {
        if self.links.attachments().iter().any(|one| matches!(one, Attachment::Tcx(..))) {
            return true;
        }
        let indices: Vec<u32> = self.interfaces.known().iter().map(|interface| interface.index).collect();
        indices.into_iter().any(|index| {
            [Direction::In, Direction::Out]
                .into_iter()
                .any(|direction| clsact::is_attached(&mut self.netlink, index, direction).unwrap_or(false))
        })
    }

    /// Attaches XDP to an interface; at the start only, since network cards may lose their link over it.
    pub(super) fn cover_xdp(&mut self, interface: &Interface, mode: Xdp) -> XdpState {
        self.ensure_xdp(interface, mode).unwrap_or_else(|error| XdpState::Failed { reason: chain(&error) })
    }

    fn ensure_xdp(&mut self, interface: &Interface, mode: Xdp) -> Result<XdpState, DataPathError> {
        let attachment = Attachment::Xdp(interface.index);
        let modes: &[(XdpState, u32)] = match mode {
            _ if !interface.kind.wants_xdp() || self.is_excluded(&interface.name) => &[],
            Xdp::Auto => &[(XdpState::Native, link_flags::XDP_NATIVE), (XdpState::Generic, link_flags::XDP_GENERIC)],
            Xdp::Native => &[(XdpState::Native, link_flags::XDP_NATIVE)],
            Xdp::Generic => &[(XdpState::Generic, link_flags::XDP_GENERIC)],
            Xdp::Off => &[],
        };
        let adopted = match interface.xdp {
            XdpAttached::Native => XdpState::Native,
            XdpAttached::Generic => XdpState::Generic,
            XdpAttached::None | XdpAttached::Other => XdpState::Unused,
        };
        if self.links.get(attachment).is_some() {
            if modes.iter().any(|(state, _)| *state == adopted) {
                return Ok(adopted);
            }
            // tc judges alone while the mode changes.
            self.links.remove(attachment)?;
        }
        let mut refusal = None;
        for (state, flags) in modes {
            for name in self.programs.xdp_names() {
                let program = self.programs.fd(Copy::Main, name)?;
                match sys::link_create(program, interface.index, attachment.attach_type(), *flags) {
                    Ok(link) => {
                        self.links.insert(attachment, link, Copy::Main)?;
                        return Ok(state.clone());
                    }
                    // The same mode is taken, or another one.
                    Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EEXIST)) => {
                        return Ok(XdpState::Occupied);
                    }
                    Err(error) => refusal = Some(error),
                }
            }
        }
        Ok(refusal.map_or(XdpState::Unused, |error| XdpState::Failed { reason: error.to_string() }))
    }

    /// Looks at what the kernel really has attached, mends it, and tells both. Never detaches before it has attached.
    pub fn verify(&mut self) -> Result<Coverage, DataPathError> {
        self.refresh()?;
        // The backstop first: it cuts this host's sockets while the interfaces follow one by one.
        let (cgroup, cgroup_mended) = self.cover_cgroup();
        let (mut interfaces, mut mended_now, mut degraded) = (Vec::new(), Vec::new(), Vec::new());
        for interface in self.interfaces.known().to_vec() {
            let [(ingress, at_ingress), (egress, at_egress)] = self.cover(&interface);
            for (hook, state, outcome) in [("ingress", &ingress, at_ingress), ("egress", &egress, at_egress)] {
                let name = &interface.name;
                match outcome {
                    Outcome::Kept => {}
                    Outcome::Attached => {
                        mended_now.push(format!("{name}: the classifier was missing at {hook} and is attached again"));
                    }
                    Outcome::Overtook(before) => mended_now.push(format!(
                        "{name}: {} ran before the classifier at {hook}, which is first again",
                        before.join(", ")
                    )),
                }
                if let HookState::Missing { reason } = state {
                    degraded.push(format!("{name}: nothing is attached at {hook}: {reason}"));
                }
            }
            let (xdp, repinned) = self.verify_xdp(&interface);
            if repinned {
                mended_now.push(format!("{}: the pin of the XDP link was deleted and is back", interface.name));
            }
            match &xdp {
                XdpState::Native | XdpState::Generic | XdpState::Unused => {}
                XdpState::Occupied => degraded.push(format!(
                    "{}: XDP is taken by another program, which stays; the classifier cuts alone",
                    interface.name
                )),
                XdpState::Failed { reason } => {
                    degraded.push(format!("{}: XDP was refused ({reason}); the classifier cuts alone", interface.name))
                }
            }
            let Interface { index, name, kind, .. } = interface;
            interfaces.push(InterfaceCoverage { name, index, kind, ingress, egress, xdp });
        }
        match self.maps.pins.mend() {
            Ok(paths) => mended_now
                .extend(paths.into_iter().map(|path| format!("the pin {} was deleted and is back", path.display()))),
            Err(error) => degraded.push(chain(&error)),
        }
        mended_now.extend(cgroup_mended);
        for (hook, state) in [("ingress", &cgroup.ingress), ("egress", &cgroup.egress), ("sockets", &cgroup.sockets)] {
            if let HookState::Missing { reason } = state {
                degraded.push(format!("cgroup root, {hook}: {reason}"));
            }
        }
        if !self.armed {
            degraded.push(
                "attach = \"on-fence\": nothing cuts at the deadline if the agent is dead; the guarantee is forfeited"
                    .to_owned(),
            );
        }
        self.mended += mended_now.len() as u64;
        Ok(Coverage { armed: self.armed, interfaces, cgroup, mended: self.mended, mended_now, degraded })
    }

    fn verify_xdp(&mut self, interface: &Interface) -> (XdpState, bool) {
        let attachment = Attachment::Xdp(interface.index);
        let state = self.xdp.get(&interface.index).cloned().unwrap_or(XdpState::Unused);
        if !matches!(state, XdpState::Native | XdpState::Generic) {
            return (state, false);
        }
        if !self.links.is_alive(attachment) {
            let reason = "its link is dead; it is attached again at the next start".to_owned();
            return (XdpState::Failed { reason }, false);
        }
        match self.links.repin(attachment) {
            Ok(repinned) => (state, repinned),
            Err(error) => (XdpState::Failed { reason: chain(&error) }, false),
        }
    }
}
