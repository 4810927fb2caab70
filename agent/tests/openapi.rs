//! `openapi.json` against the running server: what is described answers as described, and nothing else is there.

use std::collections::BTreeSet;

use hyper::{Method, StatusCode, body::Bytes};
use portcullis::api::{client::Client, routes};
use serde_json::{Value, json};
use std::time::Duration;

mod fake;

use fake::Fake;

fn description() -> Value {
    serde_json::from_str(include_str!("../openapi.json")).expect("JSON")
}

/// Every path and method.
fn operations(description: &Value) -> BTreeSet<(String, String)> {
    let paths = description["paths"].as_object().expect("paths");
    let of_path = |(path, item): (&String, &Value)| {
        let methods = item.as_object().expect("an object").keys().filter(|key| *key != "parameters");
        methods.map(|method| (path.clone(), method.to_uppercase())).collect::<Vec<_>>()
    };
    paths.iter().flat_map(of_path).collect()
}

/// Objects may hold nothing that is not described. Clients must not be so strict, so this is not in the file.
fn closed(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            fields.values_mut().for_each(closed);
            if fields.get("type") == Some(&json!("object")) && fields.contains_key("properties") {
                fields.insert("additionalProperties".into(), json!(false));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(closed),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn assert_valid(description: &Value, schema: &Value, instance: &Value) {
    let mut components = description["components"].clone();
    closed(&mut components);
    let schema = json!({"$ref": schema["$ref"], "components": components});
    let validator = jsonschema::draft202012::new(&schema).expect("a schema");
    let errors: Vec<String> =
        validator.iter_errors(instance).map(|error| format!("{}: {error}", error.instance_path)).collect();
    assert!(errors.is_empty(), "{instance:#} is not as described: {errors:#?}");
}

#[test]
fn every_route_is_described_and_every_description_has_a_route() {
    let table = routes::table();
    let there: BTreeSet<_> = table.iter().map(|(method, path, _)| (path.to_string(), method.to_string())).collect();
    assert_eq!(there.len(), table.len(), "a route is in the table twice");
    assert_eq!(there, operations(&description()));
}

#[tokio::test]
async fn every_path_and_method_answers_as_described() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::start(&folder.path().join("agent.sock"));
    let client = Client::new(&fake.socket);
    let description = description();
    let held = fake.take("somebody", Duration::from_secs(600));
    let long = json!({"reason": "x".repeat(20_000)});
    let service = "/v1/services/{name}";
    // Path, method, what `{name}` stands for and the query, body, expected status.
    let requests = [
        ("/v1/services", "GET", "", json!(null), 200),
        (service, "GET", "web", json!(null), 200),
        (service, "GET", "nobody", json!(null), 404),
        (service, "GET", "%ff", json!(null), 400),
        ("/v1/services/{name}/fence", "POST", "web", json!({"reason": "drill"}), 200),
        (service, "GET", "web", json!(null), 200),
        ("/v1/services/{name}/fence", "POST", "web", json!({"token": 1}), 409),
        ("/v1/services/{name}/fence", "POST", "web", json!({"reson": "drill"}), 400),
        ("/v1/services/{name}/fence", "POST", "web", json!({"reason": "two\nlines"}), 400),
        ("/v1/services/{name}/fence", "POST", "web", long.clone(), 413),
        ("/v1/services/{name}/fence", "POST", "nobody", json!({}), 404),
        ("/v1/services/{name}/unfence", "POST", "web", json!({"token": held}), 200),
        ("/v1/services/{name}/unfence", "POST", "web", json!({"token": 1}), 409),
        ("/v1/services/{name}/unfence", "POST", "web", json!([]), 400),
        ("/v1/services/{name}/unfence", "POST", "web", long.clone(), 413),
        ("/v1/services/{name}/unfence", "POST", "nobody", json!({}), 404),
        ("/v1/services/{name}/mark", "PUT", "web", json!({"mark": 1, "reason": "restored"}), 409),
        ("/v1/services/{name}/mark", "PUT", "away", json!({"mark": 1, "reason": "restored"}), 200),
        ("/v1/services/{name}/mark", "PUT", "web", json!({"reason": "restored"}), 400),
        ("/v1/services/{name}/mark", "PUT", "nobody", json!({"mark": 1}), 404),
        ("/v1/services/{name}/mark", "PUT", "web", long.clone(), 413),
        ("/v1/services/{name}/lease", "POST", "web", json!({"holder": "me", "ttl_ms": 5000}), 409),
        ("/v1/services/{name}/lease", "POST", "away", json!({"holder": "me", "ttl_ms": 5000}), 409),
        ("/v1/services/{name}/lease", "POST", "nobody", json!({"holder": "me", "ttl_ms": 5000}), 404),
        ("/v1/services/{name}/lease", "POST", "web", json!({"holder": "", "ttl_ms": 5000}), 400),
        ("/v1/services/{name}/lease", "POST", "web", json!({"holder": "me", "ttl_ms": 0}), 400),
        ("/v1/services/{name}/lease", "POST", "web", json!({"holder": "me", "ttl_ms": -1}), 400),
        ("/v1/services/{name}/lease", "POST", "web", long.clone(), 413),
        ("/v1/services/{name}/lease", "PUT", "web", json!({"token": held}), 200),
        ("/v1/services/{name}/lease", "PUT", "web", json!({"token": held + 1}), 409),
        ("/v1/services/{name}/lease", "PUT", "nobody", json!({"token": 1}), 404),
        ("/v1/services/{name}/lease", "PUT", "web", json!({"token": "1"}), 400),
        ("/v1/services/{name}/lease", "PUT", "web", long, 413),
        ("/v1/services/{name}/lease", "DELETE", "web?token=1", json!(null), 409),
        ("/v1/services/{name}/lease", "DELETE", "web?token=x", json!(null), 400),
        ("/v1/services/{name}/lease", "DELETE", "web?token=1&force=1", json!(null), 400),
        ("/v1/services/{name}/lease", "DELETE", "nobody?token=1", json!(null), 404),
        ("/v1/services/{name}/lease", "DELETE", &format!("web?token={held}"), json!(null), 200),
        ("/v1/services/{name}/lease", "POST", "web", json!({"holder": "me", "ttl_ms": 5000}), 200),
        ("/v1/health", "GET", "", json!(null), 200),
        ("/v1/coverage", "GET", "", json!(null), 200),
        ("/v1/reload", "POST", "", json!(null), 200),
        ("/metrics", "GET", "", json!(null), 200),
    ];
    let mut answered = BTreeSet::new();
    for (path, method, name, body, status) in requests {
        let (name, query) =
            name.split_once('?').map_or((name, String::new()), |(name, query)| (name, format!("?{query}")));
        let target = format!("{}{query}", path.replace("{name}", name));
        let sent = if body.is_null() { Bytes::new() } else { Bytes::from(body.to_string()) };
        let verb = Method::from_bytes(method.as_bytes()).expect("a method");
        let (got, bytes) = client.exchange(verb, &target, sent).await.expect("an answer");
        let text = String::from_utf8_lossy(&bytes);
        assert_eq!(got, status, "{method} {target} {body}: {text}");
        let response = &description["paths"][path][method.to_lowercase()]["responses"][status.to_string()];
        assert!(response.is_object(), "{method} {path}: {status} is not described");
        if let Some(schema) = response["content"].get("application/json") {
            assert_valid(&description, &schema["schema"], &serde_json::from_slice(&bytes).expect("JSON"));
        }
        if status == 200 {
            answered.insert((path.to_owned(), method.to_owned()));
        }
    }
    // The stream of events never ends; it has a test of its own.
    answered.insert(("/v1/events".into(), "GET".into()));
    assert_eq!(answered, operations(&description));
}

#[tokio::test]
async fn an_event_is_as_described() {
    let description = description();
    let event = serde_json::to_value(fake::event(1, "x")).expect("JSON");
    assert_valid(&description, &json!({"$ref": "#/components/schemas/Event"}), &event);
}

#[tokio::test]
async fn paths_and_methods_that_are_not_described_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let fake = Fake::start(&folder.path().join("agent.sock"));
    let client = Client::new(&fake.socket);
    let description = description();
    let refused = [
        (Method::GET, "/", StatusCode::NOT_FOUND),
        (Method::GET, "/v2/services", StatusCode::NOT_FOUND),
        (Method::GET, "/v1/services/web/lease/x", StatusCode::NOT_FOUND),
        (Method::GET, "/v1/services/web/lease", StatusCode::METHOD_NOT_ALLOWED),
        (Method::DELETE, "/v1/services/web", StatusCode::METHOD_NOT_ALLOWED),
        (Method::PUT, "/metrics", StatusCode::METHOD_NOT_ALLOWED),
    ];
    for (method, path, status) in refused {
        let (got, bytes) = client.exchange(method.clone(), path, Bytes::new()).await.expect("an answer");
        assert_eq!(got, status, "{method} {path}");
        let answer = serde_json::from_slice(&bytes).expect("JSON");
        assert_valid(&description, &json!({"$ref": "#/components/schemas/Error"}), &answer);
    }
    assert!(fake.log().is_empty());
}
