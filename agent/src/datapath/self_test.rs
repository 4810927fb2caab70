//! Synthetic packets through the very programs that are attached: is a service's traffic judged as its gate says?

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use aya::{TestRun, TestRunOptions, programs::ProgramError};
use portcullis_common::layout::programs;
use thiserror::Error;

use super::{DataPath, coverage::XdpState, error::DataPathError};
use crate::config::model::{Ports, Protocol, Service};

/// One end of a service's traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    pub end: End,
    pub address: IpAddr,
    pub protocol: Protocol,
    pub port: u16,
}

impl Probe {
    /// What stands for a service's traffic: of each kind of selector the first few addresses, with their first ports.
    /// None for a service that is the whole node.
    pub fn of(service: &Service) -> Vec<Self> {
        const FEW: usize = 8;
        /// The discard port, where the selectors name none.
        const ANY: [Ports; 1] = [Ports { protocol: Protocol::Tcp, first: 9, last: 9 }];
        let or_any = |ports: &[Ports]| if ports.is_empty() { ANY.to_vec() } else { ports.to_vec() };
        let (ports, remote_ports) = (or_any(&service.ports), or_any(&service.remote_ports));
        let local = [(End::Local, &service.addresses, &ports), (End::Local, &service.behind, &ports)];
        let remote = [(End::Remote, &service.behind, &ports), (End::Remote, &service.remotes, &remote_ports)];
        local
            .into_iter()
            .chain(remote)
            .flat_map(|(end, prefixes, ports)| {
                prefixes.iter().take(FEW).flat_map(move |prefix| {
                    ports.iter().take(FEW).map(move |ports| Self {
                        end,
                        address: prefix.address,
                        protocol: ports.protocol,
                        port: ports.first,
                    })
                })
            })
            .collect()
    }
}

/// Whose end [`Probe::address`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// This host's: destination of what comes in, source of what goes out.
    Local,
    /// The peer's: source of what comes in, destination of what goes out.
    Remote,
}

/// What a program did, or is expected to do, with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    Pass,
    Drop,
}

/// Why a self-test failed. The service is to be fenced: its gate does not do what it says.
#[derive(Debug, Error)]
pub enum SelfTestError {
    #[error(
        "{program} gave {found:?} for {probe:?} where {expected:?} was expected; look for another service whose gate is closed and whose selectors match, and at `portcullis status`"
    )]
    Judged { program: &'static str, probe: Probe, found: Judgement, expected: Judgement },
    #[error("{program} answered {answer}, which is neither pass nor drop")]
    Unknown { program: &'static str, answer: u32 },
    #[error("{program} could not be run on a test packet; see `portcullis doctor`")]
    Run {
        program: &'static str,
        #[source]
        source: Box<ProgramError>,
    },
    #[error(transparent)]
    DataPath(#[from] DataPathError),
}

/// The other end: addresses and ports for documentation, which no service has.
const PEER_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const PEER_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
const PEER_PORT: u16 = 40_000;

const TC_SHOT: u32 = 2;
const TC_NEXT: u32 = u32::MAX;
const XDP_DROP: u32 = 1;
const XDP_PASS: u32 = 2;

impl DataPath {
    /// Sends a packet of `probe` in both directions through the classifiers, and inwards through XDP where it is used.
    ///
    /// Outgoing packets are judged as forwarded ones: they have no socket, so the gate's deadline alone decides.
    pub fn self_test(&self, probe: &Probe, expected: Judgement) -> Result<(), SelfTestError> {
        let incoming = packet(probe, true);
        let outgoing = packet(probe, false);
        self.judge(programs::TC_IN, probe, &incoming, expected)?;
        self.judge(programs::TC_OUT, probe, &outgoing, expected)?;
        if self.xdp.values().any(|state| matches!(state, XdpState::Native | XdpState::Generic)) {
            self.judge_xdp(probe, &incoming, expected)?;
        }
        Ok(())
    }

    fn judge(
        &self,
        program: &'static str,
        probe: &Probe,
        packet: &[u8],
        expected: Judgement,
    ) -> Result<(), SelfTestError> {
        let context = self.forwarded();
        let options = TestRunOptions { data_in: Some(packet), ctx_in: Some(&context), ..TestRunOptions::default() };
        let run = self.programs.classifier(program)?.test_run(options);
        let found = match run.map_err(|source| SelfTestError::Run { program, source: Box::new(source) })?.return_value {
            TC_SHOT => Judgement::Drop,
            TC_NEXT => Judgement::Pass,
            answer => return Err(SelfTestError::Unknown { program, answer }),
        };
        compare(program, probe, found, expected)
    }

    /// On an interface that is not `lo`, where other roles count. Kernels before 5.15 take no interface: there the
    /// classifiers, which suffice alone, have been tested.
    fn judge_xdp(&self, probe: &Probe, packet: &[u8], expected: Judgement) -> Result<(), SelfTestError> {
        let program = self.programs.xdp_names()[0];
        let context = self.received(packet);
        let options = TestRunOptions { data_in: Some(packet), ctx_in: Some(&context), ..TestRunOptions::default() };
        let run = match self.programs.xdp()?.test_run(options) {
            Err(ProgramError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::EINVAL) => {
                return Ok(());
            }
            run => run.map_err(|source| SelfTestError::Run { program, source: Box::new(source) })?,
        };
        let found = match run.return_value {
            XDP_DROP => Judgement::Drop,
            XDP_PASS => Judgement::Pass,
            answer => return Err(SelfTestError::Unknown { program, answer }),
        };
        compare(program, probe, found, expected)
    }

    /// A `struct xdp_md` of a packet that came in by an interface on which XDP is used.
    fn received(&self, packet: &[u8]) -> [u8; 24] {
        const DATA_END: usize = 4;
        const INGRESS_IFINDEX: usize = 12;
        let used = |state: &XdpState| matches!(state, XdpState::Native | XdpState::Generic);
        let interface = self.xdp.iter().find(|(_, state)| used(state)).map_or(0, |(index, _)| *index);
        // A test packet is some tens of bytes long.
        let length = u32::try_from(packet.len()).unwrap_or(u32::MAX);
        let mut context = [0; 24];
        context[DATA_END..DATA_END + 4].copy_from_slice(&length.to_ne_bytes());
        context[INGRESS_IFINDEX..INGRESS_IFINDEX + 4].copy_from_slice(&interface.to_ne_bytes());
        context
    }

    /// The start of a `struct __sk_buff` of a packet that came in by an interface and is on its way out by another.
    fn forwarded(&self) -> [u8; 44] {
        const INGRESS_IFINDEX: usize = 36;
        const IFINDEX: usize = 40;
        // The loopback interface would be judged in both directions at once.
        let interface = self.interfaces.known().iter().map(|interface| interface.index).max().unwrap_or(1);
        let mut context = [0; 44];
        context[INGRESS_IFINDEX..INGRESS_IFINDEX + 4].copy_from_slice(&interface.to_ne_bytes());
        context[IFINDEX..IFINDEX + 4].copy_from_slice(&interface.to_ne_bytes());
        context
    }
}

fn compare(program: &'static str, probe: &Probe, found: Judgement, expected: Judgement) -> Result<(), SelfTestError> {
    if found == expected {
        return Ok(());
    }
    Err(SelfTestError::Judged { program, probe: *probe, found, expected })
}

/// An Ethernet frame with one packet of the service: for TCP a segment with the ACK flag and a byte of payload.
fn packet(probe: &Probe, incoming: bool) -> Vec<u8> {
    let at_source = match probe.end {
        End::Local => !incoming,
        End::Remote => incoming,
    };
    let (source_port, destination_port) = if at_source { (probe.port, PEER_PORT) } else { (PEER_PORT, probe.port) };
    let mut payload = Vec::new();
    payload.extend(source_port.to_be_bytes());
    payload.extend(destination_port.to_be_bytes());
    let protocol = match probe.protocol {
        Protocol::Tcp => {
            // Sequence and acknowledgement numbers, data offset, flags (ACK), window, checksum, urgent pointer.
            payload.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
            6
        }
        Protocol::Udp => {
            payload.extend([0, 9, 0, 0]);
            17
        }
        Protocol::Sctp => {
            // Verification tag and checksum, then the start of a chunk.
            payload.extend([0; 8]);
            132
        }
    };
    payload.push(0xaa);

    // Locally administered addresses.
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
    // A test packet is some tens of bytes long.
    let length = |extra: usize| u16::try_from(payload.len() + extra).unwrap_or(u16::MAX).to_be_bytes();
    match probe.address {
        IpAddr::V4(address) => {
            let (source, destination) = if at_source { (address, PEER_V4) } else { (PEER_V4, address) };
            frame.extend([0x08, 0x00, 0x45, 0]);
            frame.extend(length(20));
            // Identification, "don't fragment", time to live, protocol, no checksum.
            frame.extend([0, 1, 0x40, 0, 64, protocol, 0, 0]);
            frame.extend(source.octets());
            frame.extend(destination.octets());
        }
        IpAddr::V6(address) => {
            let (source, destination) = if at_source { (address, PEER_V6) } else { (PEER_V6, address) };
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(length(0));
            frame.extend([protocol, 64]);
            frame.extend(source.octets());
            frame.extend(destination.octets());
        }
    }
    frame.extend(payload);
    frame
}
