//! Packets dropped per second of processor time, by whatever drops them.
//!
//! Frames are made once and sent again and again by a test run with live frames, straight into the ring of the other end
//! of a veth pair: no socket, no queue, no stack on the sending side. The receiving side is polled by a kernel thread of
//! its own (threaded NAPI), which takes frames and drops them and does nothing else; its processor time is what is
//! measured, whatever the sender costs. Both run on one processor: between two, handing the frames' memory back would cost
//! more than dropping them.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use aya::{TestRunAttrs, TestRunOptions};
use rustix::{
    mount::{MountFlags, MountPropagationFlags, mount, mount_change},
    thread::{UnshareFlags, unshare_unsafe},
};

use super::{
    gates::{CLOSED_ADDRESS, Object},
    pin,
    timing::{segment, xdp_context},
};
use crate::{
    clock,
    world::{Namespace, World},
};

/// Frames of one call: some tenths of a second. Every call waits out an exchange of the kernel's XDP dispatcher first, in
/// which nothing is sent.
const FRAMES: u32 = 1 << 19;
const BATCH: u32 = 64;
/// The processor of both threads.
const DROPPING: usize = 1;
const WARM_UP: Duration = Duration::from_millis(100);

/// A veth pair between a sender and a receiver whose packets a kernel thread takes in.
#[derive(Debug)]
pub struct Lane {
    sender: Namespace,
    receiver: Namespace,
    interface: String,
    poller: u32,
    frame: Vec<u8>,
}

/// What was dropped.
#[derive(Clone, Copy, Debug)]
pub struct Dropped {
    pub packets: u64,
    /// Of the dropping thread.
    pub cpu: Duration,
}

impl Dropped {
    /// Packets for each second of processor time.
    #[expect(clippy::cast_precision_loss, reason = "some millions")]
    pub fn rate(self) -> f64 {
        self.packets as f64 / self.cpu.as_secs_f64()
    }
}

#[derive(Clone, Copy, Debug)]
struct Reading {
    packets: u64,
    segments: u64,
    cpu_ns: u64,
}

impl Lane {
    pub fn new(world: &World) -> Self {
        let (sender, receiver) = (world.namespace("sender"), world.namespace("receiver"));
        // The kernel thread bears the interface's name, and is to be found among those of the whole machine.
        let interface = format!("pc{}", std::process::id());
        let address = std::net::Ipv4Addr::from(CLOSED_ADDRESS);
        world.link(&sender, &interface, "10.9.0.1/24", &receiver, &interface, &format!("10.9.0.2/24 {address}/32"));
        // Without XDP and without GRO a veth has no NAPI; with GRO all that is compared start from the same.
        receiver.output("ethtool", &["-K", &interface, "gro", "on"]);
        receiver.run(|| poll_by_thread(&receiver_sysfs(world), &interface));
        let poller = poller(&interface);
        pin(Some(poller), DROPPING);
        let mut frame = segment(CLOSED_ADDRESS);
        frame[..6].copy_from_slice(&hardware_address(&receiver, &interface));
        Self { sender, receiver, interface, poller, frame }
    }

    pub fn receiver(&self) -> &Namespace {
        &self.receiver
    }

    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// Floods the receiver for `duration`, and checks that not one packet got to its TCP.
    pub fn flood(&self, generator: &Object, duration: Duration) -> Dropped {
        let stop = AtomicBool::new(false);
        let (before, after) = thread::scope(|scope| {
            scope.spawn(|| self.send(generator, &stop));
            clock::sleep_until(clock::now().saturating_add(WARM_UP));
            let before = self.read();
            clock::sleep_until(clock::now().saturating_add(duration));
            let after = self.read();
            stop.store(true, Ordering::Relaxed);
            (before, after)
        });
        assert_eq!(after.segments, before.segments, "what was to be dropped has arrived");
        assert_ne!(after.packets, before.packets, "nothing was sent");
        Dropped { packets: after.packets - before.packets, cpu: Duration::from_nanos(after.cpu_ns - before.cpu_ns) }
    }

    fn send(&self, generator: &Object, stop: &AtomicBool) {
        pin(None, DROPPING);
        self.sender.enter();
        let context = xdp_context(self.frame.len(), index(&self.sender, &self.interface));
        while !stop.load(Ordering::Relaxed) {
            let options = TestRunOptions {
                data_in: Some(&self.frame),
                ctx_in: Some(&context),
                repeat: FRAMES,
                attrs: TestRunAttrs::new().xdp_live_frames(BATCH),
                ..TestRunOptions::default()
            };
            generator.test_run("bench_transmit", options);
        }
    }

    fn read(&self) -> Reading {
        let cpu = read(&format!("/proc/{}/schedstat", self.poller));
        let cpu_ns = number(cpu.split_whitespace().next());
        self.receiver.run(|| {
            let device = read("/proc/thread-self/net/dev");
            let line = device.lines().find_map(|line| line.trim_start().strip_prefix(&format!("{}:", self.interface)));
            // "Tcp:" is followed by the names in its first line, by the values in its second; InSegs is the tenth.
            let snmp = read("/proc/thread-self/net/snmp");
            let tcp = snmp.lines().filter_map(|line| line.strip_prefix("Tcp:")).nth(1);
            Reading {
                packets: number(line.and_then(|line| line.split_whitespace().nth(1))),
                segments: number(tcp.and_then(|line| line.split_whitespace().nth(9))),
                cpu_ns,
            }
        })
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("read {path}: {e}"))
}

fn number(field: Option<&str>) -> u64 {
    field.and_then(|field| field.parse().ok()).expect("a number of the kernel's statistics")
}

fn receiver_sysfs(world: &World) -> std::path::PathBuf {
    let folder = world.folder().join("sysfs");
    fs::create_dir(&folder).unwrap_or_else(|e| panic!("make {}: {e}", folder.display()));
    folder
}

/// Has the calling thread's network namespace poll `interface` by a kernel thread.
fn poll_by_thread(folder: &std::path::Path, interface: &str) {
    // Which namespace's interfaces a sysfs shows is decided when it is mounted; the mount is gone with this thread.
    // SAFETY: only the mount namespace of a thread that ends after this is unshared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap_or_else(|e| panic!("make a mount namespace: {e}"));
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .unwrap_or_else(|e| panic!("keep mounts to the thread: {e}"));
    mount("sysfs", folder, "sysfs", MountFlags::empty(), None)
        .unwrap_or_else(|e| panic!("mount a sysfs at {}: {e}", folder.display()));
    let path = folder.join("class/net").join(interface).join("threaded");
    fs::write(&path, "1").unwrap_or_else(|e| panic!("write {}: {e}", path.display()));
}

/// The kernel thread that polls `interface`.
fn poller(interface: &str) -> u32 {
    let prefix = format!("napi/{interface}-");
    let mut found = None;
    clock::wait_until(Duration::from_secs(1), || {
        let entries = fs::read_dir("/proc").unwrap_or_else(|e| panic!("list /proc: {e}"));
        found = entries.flatten().find_map(|entry| {
            let name = fs::read_to_string(entry.path().join("comm")).ok()?;
            name.starts_with(&prefix).then(|| entry.file_name().to_str()?.parse().ok()).flatten()
        });
        found.is_some()
    });
    found.unwrap_or_else(|| panic!("no kernel thread polls {interface}"))
}

fn hardware_address(namespace: &Namespace, interface: &str) -> [u8; 6] {
    let shown = namespace.ip(&format!("-o link show dev {interface}"));
    let mut words = shown.split_whitespace().skip_while(|word| *word != "link/ether");
    let address = words.nth(1).expect("a veth has a hardware address");
    let bytes: Vec<u8> = address.split(':').filter_map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes.try_into().expect("six bytes")
}

/// The number of an interface.
pub fn index(namespace: &Namespace, interface: &str) -> u32 {
    let shown = namespace.ip(&format!("-o link show dev {interface}"));
    shown.split(':').next().and_then(|index| index.parse().ok()).expect("ip shows the number first")
}
