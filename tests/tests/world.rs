//! The test world tests itself: a harness that counts wrongly, or leaves things behind, proves nothing.

use portcullis_tests::{clock, residue, world::World};

#[test]
fn hosts_reach_each_other_and_nothing_is_left() {
    let world = World::new("reach");
    let client = world.namespace("client");
    let node = world.node("node");
    world.link(&client, "eth0", "10.9.0.1/24 fd09::1/64", &node, "eth0", "10.9.0.2/24 fd09::2/64");
    node.add_address("eth0", "10.9.0.100/32");
    node.add_address("eth0", "fd09::100/128");
    for address in ["10.9.0.2", "10.9.0.100", "fd09::2", "fd09::100"] {
        client.output("ping", &["-c", "1", "-W", "2", address]);
    }
    let mut sleeper = node.spawn("sleeper", node.command("sleep").arg("100"));
    assert_eq!(node.cgroup().processes(), [sleeper.pid()]);
    sleeper.stop();
    sleeper.kill();
    let folder = world.folder().to_owned();
    drop(world);
    assert!(!folder.exists());
}
