//! The socket itself: who may, what is in the way, readers that are too slow.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::{
        fs::{MetadataExt as _, PermissionsExt as _},
        net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use portcullis::api::{
    client::{Client, ClientError},
    command::queues,
    routes::Api,
    server::{Server, ServerError},
    types::HoldRequest,
};
use rustix::{
    process::{Gid, Uid},
    thread::{set_thread_gid, set_thread_groups, set_thread_uid},
};

mod fake;

use fake::{EVENTS, Fake, event, until};

/// A group that every Debian has and no test user is in.
const GROUP: (&str, u32) = ("games", 60);

/// One request as somebody else: Linux keeps credentials per thread, and the kernel records those of the thread that
/// connects. The status and the body.
fn ask_as(socket: &Path, uid: u32, gid: u32, groups: &[u32], request: &str) -> (u16, String) {
    let (socket, groups, request) = (socket.to_owned(), groups.to_vec(), request.to_owned());
    let asked = thread::spawn(move || {
        let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
        set_thread_groups(&groups).expect("run this test as root");
        set_thread_gid(Gid::from_raw(gid)).expect("run this test as root");
        set_thread_uid(Uid::from_raw(uid)).expect("run this test as root");
        let mut stream = UnixStream::connect(&socket).expect("connected");
        write!(stream, "{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{{}}")
            .expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
        answer
    });
    let answer = asked.join().expect("the thread ended well");
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status line");
    (status, answer.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
}

#[tokio::test]
async fn credentials_decide() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("root");
    let socket = folder.path().join("agent.sock");
    let fake = Fake::start(&folder.path().join("fake.sock"));
    let (commands, mut inbox) = queues();
    let server = Server::bind(&socket, GROUP.0).expect("bound");
    let file = fs::metadata(&socket).expect("there");
    assert_eq!((file.mode() & 0o777, file.gid()), (0o660, GROUP.1));
    // With the mode out of the way, the server's own check is what refuses.
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).expect("root");
    let serving = tokio::spawn(server.serve(fake::api(commands, &fake.score, &fake.events)));
    let asking = tokio::task::spawn_blocking(move || {
        let read = "GET /v1/health";
        let change = "POST /v1/services/web/fence";
        let nobody = 65534;
        assert_eq!(ask_as(&socket, 0, 0, &[], read).0, 200);
        assert_eq!(ask_as(&socket, nobody, GROUP.1, &[], read).0, 200, "primary group");
        let many: Vec<u32> = (1000..1100).chain([GROUP.1]).collect();
        assert_eq!(ask_as(&socket, nobody, nobody, &many, read).0, 200, "supplementary group");
        assert_eq!(ask_as(&socket, nobody, nobody, &[], read).0, 403);
        assert_eq!(ask_as(&socket, nobody, 0, &[0], read).0, 403, "root's group is not root");
        for path in ["/v1/services", "/v1/services/web", "/v1/events", "/v1/coverage", "/metrics"] {
            assert_eq!(ask_as(&socket, nobody, nobody, &[], &format!("GET {path}")).0, 403, "{path}");
        }
        let (status, body) = ask_as(&socket, nobody, GROUP.1, &[], change);
        assert_eq!(status, 403);
        assert!(body.contains("\"code\":\"forbidden\"") && body.contains("uid 65534"), "{body}");
        for request in [
            "POST /v1/services/web/unfence",
            "POST /v1/services/web/lease",
            "PUT /v1/services/web/lease",
            "DELETE /v1/services/web/lease?token=1",
            "PUT /v1/services/web/mark",
            "POST /v1/reload",
        ] {
            assert_eq!(ask_as(&socket, nobody, GROUP.1, &[], request).0, 403, "{request}");
        }
    });
    tokio::select! {
        asked = asking => asked.expect("every check passed"),
        command = inbox.next() => panic!("a command of somebody who may not: {command:?}"),
    }
    serving.abort();
}

#[tokio::test]
async fn commands_carry_who_asked() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::start(&folder.path().join("agent.sock"));
    let request = HoldRequest { token: None, reason: "drill".into() };
    let status = Client::new(&fake.socket).fence("web", &request).await.expect("fenced");
    let hold = status.manual_hold.expect("held");
    assert_eq!((hold.uid, hold.reason.as_str()), (0, "drill"));
    assert_eq!(hold.pid.unsigned_abs(), std::process::id());
}

#[tokio::test]
async fn a_dead_socket_is_replaced_and_nothing_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run/agent.sock");
    let first = Server::bind(&path, "no-such-group").expect("the folder is made");
    assert!(matches!(Server::bind(&path, "no-such-group"), Err(ServerError::InUse { .. })));
    drop(first);
    assert!(!path.exists());
    drop(UnixListener::bind(&path).expect("bound"));
    assert!(path.exists(), "what a killed agent leaves");
    drop(Server::bind(&path, "no-such-group").expect("replaced"));
    fs::write(&path, "precious").expect("written");
    assert!(matches!(Server::bind(&path, "no-such-group"), Err(ServerError::InTheWay { .. })));
    assert_eq!(fs::read_to_string(&path).expect("there"), "precious");
}

#[test]
fn a_slow_reader_is_told_and_dropped_and_holds_nobody_up() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::start(&folder.path().join("agent.sock"));
    let mut stream = UnixStream::connect(&fake.socket).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
    write!(stream, "GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n").expect("sent");
    until("the reader has subscribed", || (fake.events.receiver_count() == 1).then_some(()));
    // Nobody reads: at some point the socket and the server's buffers are full, and an event stays in the channel.
    let filler = "x".repeat(64 * 1024);
    let mut sent = 0;
    let mut send = || {
        sent += 1;
        _ = fake.events.send(Arc::new(event(sent, &filler)));
        sent
    };
    let is_taken = || {
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(500) && !fake.events.is_empty() {
            thread::yield_now();
        }
        fake.events.is_empty()
    };
    while is_taken() {
        assert!(send() < 1000, "the server takes in what nobody reads without end");
    }
    // From here on the reader falls behind, and sending goes on as if nothing were.
    let sent = (0..2 * EVENTS).map(|_| send()).last().expect("some");
    let mut names = Vec::new();
    for line in BufReader::new(stream).lines() {
        let line = line.expect("the stream ends in order");
        if let Some(name) = line.strip_prefix("event: ") {
            names.push(name.to_owned());
        }
        if line == "0" {
            break;
        }
    }
    assert_eq!(names.first().map(String::as_str), Some("command"));
    assert_eq!(names.last().map(String::as_str), Some("lagged"));
    assert!((names.len() as u64) < sent);
    until("the reader is gone", || (fake.events.receiver_count() == 0).then_some(()));
}

#[tokio::test]
async fn a_fence_overtakes_every_other_command() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::start(&folder.path().join("fake.sock"));
    let socket = folder.path().join("agent.sock");
    let (commands, mut inbox) = queues();
    let server = Server::bind(&socket, "no-such-group").expect("bound");
    let api: Api = fake::api(commands, &fake.score, &fake.events);
    let serving = tokio::spawn(server.serve(api));
    // Nobody takes anything out, so 256 requests wait and the 257th is refused at once.
    let client = Client::new(&socket).with_timeout(Duration::from_secs(20));
    let mut renewals = tokio::task::JoinSet::new();
    for _ in 0..257 {
        let client = client.clone();
        renewals.spawn(async move { client.renew("web", 1).await });
    }
    let refused = renewals.join_next().await.expect("one").expect("no panic").expect_err("refused");
    assert_eq!(refused.code(), Some("busy"));
    let fencing = tokio::spawn(async move { client.fence("web", &HoldRequest::default()).await });
    let first_fence = async {
        loop {
            match inbox.next_fence() {
                Some(command) => break command,
                None => tokio::task::yield_now().await,
            }
        }
    };
    let fence = tokio::time::timeout(Duration::from_secs(5), first_fence).await.expect("the fence overtakes");
    assert!(matches!(fence, portcullis::api::command::Command::Fence { .. }), "{fence:?}");
    // Dropped unanswered: the client hears that the agent is going down, and does not hang.
    drop(fence);
    let stopping = fencing.await.expect("no panic").expect_err("refused");
    assert_eq!(stopping.code(), Some("stopping"));
    serving.abort();
}

#[tokio::test]
async fn the_client_says_what_to_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("agent.sock");
    let absent = Client::new(&path).health().await.expect_err("nobody is there");
    assert!(matches!(absent, ClientError::NoAgent { .. }));
    assert!(absent.to_string().contains("systemctl start portcullis"), "{absent}");
    let listener = UnixListener::bind(&path).expect("bound");
    let mute = Client::new(&path).with_timeout(Duration::from_millis(20)).health().await.expect_err("no answer");
    assert!(matches!(mute, ClientError::Timeout { .. }), "{mute}");
    drop(listener);
    let dead = Client::new(&path).health().await.expect_err("nobody listens");
    assert!(matches!(dead, ClientError::NoAgent { .. }));
}

#[tokio::test]
async fn metrics_are_in_prometheus_form() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::start(&folder.path().join("agent.sock"));
    let client = Client::new(&fake.socket);
    let (_, bytes) = client.exchange(hyper::Method::GET, "/metrics", Default::default()).await.expect("an answer");
    let text = String::from_utf8(bytes.to_vec()).expect("text");
    assert!(text.contains("\nportcullis_dropped_packets_total{service=\"web\"} 7\n"), "{text}");
    assert!(text.contains("# TYPE portcullis_dropped_packets_total counter\n"), "{text}");
    assert!(text.contains("\nportcullis_healthy 0\n"), "{text}");
    assert!(text.contains("\nportcullis_kernel_events_total{event=\"exempt_passed\"} 5\n"), "{text}");
}
