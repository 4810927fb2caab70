//! The requests: each is parsed, checked against the peer's rights, and handed on.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Extension, Json, Router,
    body::Bytes,
    extract::{
        DefaultBodyLimit, Path, Query, State,
        rejection::{BytesRejection, QueryRejection},
    },
    http::{Method, StatusCode, header},
    response::{IntoResponse, Response, Sse, sse},
    routing::{self, MethodRouter},
};
use futures_util::stream;
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast};

use super::{
    command::{Command, Commands, Refusal, View},
    metrics,
    peer::{Access, Peer},
    types::{
        AcquireRequest, ErrorAnswer, ErrorBody, Event, HoldRequest, Lagged, LeaseGranted, LeaseReleased,
        MAX_BODY_BYTES, MAX_HOLDER, MAX_REASON, MarkRequest, ReleaseQuery, Reloaded, RenewRequest, ServiceList,
        ServiceStatus,
    },
};

/// Readers of events at once.
const MAX_EVENT_STREAMS: usize = 64;
/// How often a silent event stream shows that it is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// What the requests work with.
#[derive(Clone)]
pub struct Api {
    pub commands: Commands,
    pub view: Arc<dyn View>,
    pub events: broadcast::Sender<Arc<Event>>,
    streams: Arc<Semaphore>,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}

impl Api {
    pub fn new(commands: Commands, view: Arc<dyn View>, events: broadcast::Sender<Arc<Event>>) -> Self {
        Self { commands, view, events, streams: Arc::new(Semaphore::new(MAX_EVENT_STREAMS)) }
    }
}

/// Every request there is. One table, so that the description can be held against it.
pub fn table() -> Vec<(Method, &'static str, MethodRouter<Api>)> {
    vec![
        (Method::GET, "/v1/services", routing::get(services)),
        (Method::GET, "/v1/services/{name}", routing::get(service)),
        (Method::POST, "/v1/services/{name}/fence", routing::post(fence)),
        (Method::POST, "/v1/services/{name}/unfence", routing::post(unfence)),
        (Method::PUT, "/v1/services/{name}/mark", routing::put(reset_mark)),
        (Method::POST, "/v1/services/{name}/lease", routing::post(acquire)),
        (Method::PUT, "/v1/services/{name}/lease", routing::put(renew)),
        (Method::DELETE, "/v1/services/{name}/lease", routing::delete(release)),
        (Method::GET, "/v1/events", routing::get(events)),
        (Method::GET, "/v1/health", routing::get(health)),
        (Method::GET, "/v1/coverage", routing::get(coverage)),
        (Method::POST, "/v1/reload", routing::post(reload)),
        (Method::GET, "/metrics", routing::get(metrics_text)),
    ]
}

/// The router. Each request must carry its connection's [`Peer`] and [`Access`] as extensions.
pub fn router(api: Api) -> Router {
    let router = table().into_iter().fold(Router::new(), |router, (_, path, route)| router.route(path, route));
    router
        .fallback(|| async { ApiError::NoSuchPath })
        .method_not_allowed_fallback(|| async { ApiError::NoSuchMethod })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(api)
}

/// Why a request was not carried out.
#[derive(Debug, thiserror::Error)]
enum ApiError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the request is not valid: {0}")]
    Invalid(String),
    #[error("the body is larger than {MAX_BODY_BYTES} bytes")]
    TooLarge,
    #[error("{peer} may not {}", match needed { Access::None | Access::Read => "read", Access::Change => "change anything" })]
    Forbidden { peer: Peer, needed: Access },
    #[error("there is no such path")]
    NoSuchPath,
    #[error("the path does not know this method")]
    NoSuchMethod,
    #[error("{MAX_EVENT_STREAMS} readers of events are connected already")]
    TooManyStreams,
}

impl ApiError {
    /// Status, code and hint.
    fn parts(&self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Self::Refused(refusal) => refused(refusal),
            Self::Invalid(_) => (StatusCode::BAD_REQUEST, "invalid", "see openapi.json for what the request may say"),
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "too_large", "send less; a reason needs one sentence"),
            Self::Forbidden { .. } => (
                StatusCode::FORBIDDEN,
                "forbidden",
                "changes need root; reading needs root or membership of the socket's group, from a new login on",
            ),
            Self::NoSuchPath => (StatusCode::NOT_FOUND, "no_such_path", "see openapi.json for the paths there are"),
            Self::NoSuchMethod => {
                (StatusCode::METHOD_NOT_ALLOWED, "no_such_method", "see openapi.json for the methods of this path")
            }
            Self::TooManyStreams => {
                (StatusCode::SERVICE_UNAVAILABLE, "too_many_streams", "close a reader that is no longer needed")
            }
        }
    }
}

fn refused(refusal: &Refusal) -> (StatusCode, &'static str, &'static str) {
    match refusal {
        Refusal::UnknownService { .. } => {
            (StatusCode::NOT_FOUND, "unknown_service", "`portcullis status` lists the services")
        }
        Refusal::StaleToken { .. } => (
            StatusCode::CONFLICT,
            "stale_token",
            "the holding has changed: look at `portcullis status`, then name the current token or none",
        ),
        Refusal::Held { .. } => (StatusCode::CONFLICT, "held", "ask again when it has expired or was released"),
        Refusal::Lost { .. } => {
            (StatusCode::CONFLICT, "lost", "stop acting as the holder; acquire again for a new token")
        }
        Refusal::TtlTooShort { .. } => {
            (StatusCode::BAD_REQUEST, "ttl_too_short", "ask for a longer TTL or configure a smaller margin")
        }
        Refusal::NotFenced { .. } => (StatusCode::CONFLICT, "not_fenced", "fence it first: `portcullis fence SERVICE`"),
        Refusal::Configuration { .. } => (
            StatusCode::CONFLICT,
            "configuration",
            "mend the file (`portcullis check` points at the line); the old configuration stays in force",
        ),
        Refusal::State { .. } => (
            StatusCode::SERVICE_UNAVAILABLE,
            "state",
            "mend the disk of `state_dir`; leases that are held can still be renewed",
        ),
        Refusal::Busy => (StatusCode::SERVICE_UNAVAILABLE, "busy", "ask again"),
        Refusal::Stopping => (StatusCode::SERVICE_UNAVAILABLE, "stopping", "ask again when the agent is back"),
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, code, hint) = self.parts();
        let (holder, expires_in_ms) = match &self {
            Self::Refused(Refusal::Held { holder, expires_in, .. }) => {
                (Some(holder.clone()), Some(millis(*expires_in)))
            }
            _ => (None, None),
        };
        let error = ErrorBody {
            code: code.to_owned(),
            message: self.to_string(),
            hint: hint.to_owned(),
            holder,
            expires_in_ms,
        };
        (status, Json(ErrorAnswer { error })).into_response()
    }
}

type Answered<T> = Result<Json<T>, ApiError>;

async fn services(Caller(_): Caller<READ>, State(api): State<Api>) -> Answered<ServiceList> {
    Ok(Json(ServiceList { services: api.view.services() }))
}

async fn service(Caller(_): Caller<READ>, State(api): State<Api>, Name(service): Name) -> Answered<ServiceStatus> {
    api.view.service(&service).map(Json).ok_or(ApiError::Refused(Refusal::UnknownService { service }))
}

async fn fence(
    Caller(by): Caller<CHANGE>,
    State(api): State<Api>,
    Name(service): Name,
    body: Result<Bytes, BytesRejection>,
) -> Answered<ServiceStatus> {
    let HoldRequest { token, reason } = parse_hold(body)?;
    let fence = |answer| Command::Fence { service, token, reason, by, answer };
    Ok(Json(api.commands.ask(fence).await?))
}

async fn unfence(
    Caller(by): Caller<CHANGE>,
    State(api): State<Api>,
    Name(service): Name,
    body: Result<Bytes, BytesRejection>,
) -> Answered<ServiceStatus> {
    let HoldRequest { token, reason } = parse_hold(body)?;
    let unfence = |answer| Command::Unfence { service, token, reason, by, answer };
    Ok(Json(api.commands.ask(unfence).await?))
}

async fn reset_mark(
    Caller(by): Caller<CHANGE>,
    State(api): State<Api>,
    Name(service): Name,
    body: Result<Bytes, BytesRejection>,
) -> Answered<ServiceStatus> {
    let MarkRequest { mark, reason } = parse(body)?;
    check_reason(&reason)?;
    Ok(Json(api.commands.ask(|answer| Command::ResetMark { service, mark, reason, by, answer }).await?))
}

async fn acquire(
    Caller(by): Caller<CHANGE>,
    State(api): State<Api>,
    Name(service): Name,
    body: Result<Bytes, BytesRejection>,
) -> Answered<LeaseGranted> {
    let AcquireRequest { holder, ttl_ms } = parse(body)?;
    if holder.is_empty() || holder.len() > MAX_HOLDER || holder.chars().any(char::is_control) {
        return Err(ApiError::Invalid(format!("`holder` must be 1 to {MAX_HOLDER} bytes without control characters")));
    }
    if ttl_ms == 0 {
        return Err(ApiError::Invalid("`ttl_ms` must be above 0".into()));
    }
    let ttl = Duration::from_millis(ttl_ms);
    let acquire = |answer| Command::Acquire { service, holder, ttl, by, answer };
    Ok(Json(api.commands.ask(acquire).await?))
}

async fn renew(
    Caller(by): Caller<CHANGE>,
    State(api): State<Api>,
    Name(service): Name,
    body: Result<Bytes, BytesRejection>,
) -> Answered<LeaseGranted> {
    let RenewRequest { token } = parse(body)?;
    Ok(Json(api.commands.ask(|answer| Command::Renew { service, token, by, answer }).await?))
}

async fn release(
    Caller(by): Caller<CHANGE>,
    State(api): State<Api>,
    Name(service): Name,
    query: Result<Query<ReleaseQuery>, QueryRejection>,
) -> Answered<LeaseReleased> {
    let Query(ReleaseQuery { token }) = query.map_err(|error| ApiError::Invalid(error.body_text()))?;
    Ok(Json(api.commands.ask(|answer| Command::Release { service, token, by, answer }).await?))
}

async fn reload(Caller(by): Caller<CHANGE>, State(api): State<Api>) -> Answered<Reloaded> {
    Ok(Json(api.commands.ask(|answer| Command::Reload { by, answer }).await?))
}

async fn health(Caller(_): Caller<READ>, State(api): State<Api>) -> Response {
    Json(api.view.health()).into_response()
}

async fn coverage(Caller(_): Caller<READ>, State(api): State<Api>) -> Response {
    Json(api.view.coverage()).into_response()
}

async fn metrics_text(Caller(_): Caller<READ>, State(api): State<Api>) -> Response {
    let text = metrics::render(&api.view.services(), &api.view.health(), &api.view.coverage());
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response()
}

async fn events(Caller(_): Caller<READ>, State(api): State<Api>) -> Result<Response, ApiError> {
    let permit = api.streams.clone().try_acquire_owned().map_err(|_| ApiError::TooManyStreams)?;
    let reader = Reader { events: api.events.subscribe(), _permit: permit };
    let stream = stream::unfold(Some(reader), next_event);
    Ok(Sse::new(stream).keep_alive(sse::KeepAlive::new().interval(KEEP_ALIVE)).into_response())
}

/// One reader's place in the events. Who falls further behind than the channel holds is told so and dropped; the
/// runtime, which only ever adds to the channel, never waits.
struct Reader {
    events: broadcast::Receiver<Arc<Event>>,
    _permit: OwnedSemaphorePermit,
}

async fn next_event(reader: Option<Reader>) -> Option<(Result<sse::Event, Infallible>, Option<Reader>)> {
    let mut reader = reader?;
    match reader.events.recv().await {
        Ok(event) => Some((Ok(event_of(event.kind.name(), &*event)), Some(reader))),
        Err(broadcast::error::RecvError::Lagged(missed)) => Some((Ok(event_of("lagged", &Lagged { missed })), None)),
        Err(broadcast::error::RecvError::Closed) => None,
    }
}

fn event_of(name: &str, data: &impl serde::Serialize) -> sse::Event {
    // A comment in place of an event that cannot be written as JSON, which plain data always can.
    sse::Event::default()
        .event(name)
        .json_data(data)
        .unwrap_or_else(|error| sse::Event::default().comment(error.to_string()))
}

const READ: bool = false;
const CHANGE: bool = true;

/// The peer, if it may do what the request needs.
struct Caller<const CHANGES: bool>(Peer);

impl<S: Send + Sync, const CHANGES: bool> axum::extract::FromRequestParts<S> for Caller<CHANGES> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut axum::http::request::Parts, state: &S) -> Result<Self, Response> {
        let Extension((peer, access)) =
            Extension::<(Peer, Access)>::from_request_parts(parts, state).await.map_err(IntoResponse::into_response)?;
        let needed = if CHANGES { Access::Change } else { Access::Read };
        if access < needed {
            tracing::warn!(%peer, path = %parts.uri.path(), method = %parts.method, "refused");
            return Err(ApiError::Forbidden { peer, needed }.into_response());
        }
        Ok(Self(peer))
    }
}

/// The service that the path names.
struct Name(String);

impl<S: Send + Sync> axum::extract::FromRequestParts<S> for Name {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut axum::http::request::Parts, state: &S) -> Result<Self, ApiError> {
        let name = Path::from_request_parts(parts, state).await;
        let Path(name) = name.map_err(|error| ApiError::Invalid(error.body_text()))?;
        Ok(Self(name))
    }
}

fn parse_hold(body: Result<Bytes, BytesRejection>) -> Result<HoldRequest, ApiError> {
    let request: HoldRequest = parse(body)?;
    check_reason(&request.reason)?;
    Ok(request)
}

fn check_reason(reason: &str) -> Result<(), ApiError> {
    if reason.len() > MAX_REASON || reason.chars().any(char::is_control) {
        return Err(ApiError::Invalid(format!("`reason` must be at most {MAX_REASON} bytes on one line")));
    }
    Ok(())
}

/// Whatever the content type says: `curl -d` names a form.
fn parse<T: DeserializeOwned>(body: Result<Bytes, BytesRejection>) -> Result<T, ApiError> {
    let body = body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::TooLarge,
        _ => ApiError::Invalid(rejection.body_text()),
    })?;
    // serde would take an array for the fields in order.
    if !body.trim_ascii_start().starts_with(b"{") {
        return Err(ApiError::Invalid("the body must be a JSON object".into()));
    }
    serde_json::from_slice(&body).map_err(|error| ApiError::Invalid(error.to_string()))
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
