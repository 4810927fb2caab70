//! A service that writes by itself.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use portcullis_tests::{
    clock, traffic,
    world::{Cgroup, Namespace, Node, Process, binary},
};

const SOON: Duration = Duration::from_secs(10);

/// A server at the service's address, in a cgroup of its own, that streams records to a client over a connection made while
/// the gate was open.
pub(crate) struct Writer {
    pub(crate) server: Process,
    pub(crate) connection: TcpStream,
}

impl Writer {
    /// Returns once the client has got a record.
    #[track_caller]
    pub(crate) fn start(node: &Node, client: &Namespace, cgroup: &Cgroup, port: u16) -> Self {
        let address = format!("10.9.0.100:{port}");
        // The namespace's command joins no cgroup but the one it is started in.
        let mut command = Namespace::command(node, binary("testserver"));
        let server = node.spawn_in(cgroup, &format!("writer-{port}"), command.arg(&address));
        assert!(clock::wait_until(SOON, || server.log().contains("ready")), "{}", server.log());
        let mut connection = traffic::connect(client, address.parse().unwrap(), SOON).unwrap();
        connection.write_all(b"stream 500\n").unwrap();
        let mut record = [0; traffic::PAYLOAD];
        connection.set_read_timeout(Some(SOON)).unwrap();
        connection.read_exact(&mut record).unwrap();
        connection.set_nonblocking(true).unwrap();
        Self { server, connection }
    }
}
