//! The OpenAPI document, made from the routes, and an HTML page of it without scripts or external resources.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::Extension;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{Html, IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The OpenAPI document and its page, made once when the server starts.
pub(crate) struct ApiDocument {
    json: String,
    page: String,
    policy: HeaderValue,
}

const STYLE: &str = "\
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}\
code,pre{font:14px/1.5 ui-monospace,monospace}pre{padding:.75rem;border:1px solid #8885;overflow-x:auto}\
section{border-top:1px solid #8885;padding:1rem 0}h2{margin:2.5rem 0 .5rem}h3{margin:0;font-size:1rem}\
h3 b{display:inline-block;min-width:3.5rem}table{border-collapse:collapse;width:100%;margin:.5rem 0}\
td,th{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;border-bottom:1px solid #8883}";

/// Responses that any route may give.
const COMMON_RESPONSES: [(&str, &str); 4] = [
    ("400", "the request is malformed"),
    ("421", "`foreign_host`: the server does not accept that host name"),
    ("500", "an internal error; see the log of the server"),
    ("503", "`store_unreachable` or `shutting_down`: retry later"),
];
/// Responses of routes that require a key.
const AUTH_RESPONSES: [(&str, &str); 3] = [
    ("401", "`no_key` or `wrong_key`"),
    ("403", "`needs_operator`: this key can only read; `cross_site`: sent by a page of another site"),
    ("429", "`too_many_failures`: too many wrong keys from this address"),
];
const BODY_RESPONSES: [(&str, &str); 3] = [
    ("408", "the body took too long to arrive"),
    ("413", "the body is too large"),
    ("415", "the Content-Type is not application/json"),
];

impl ApiDocument {
    pub(crate) fn new(made: &utoipa::openapi::OpenApi) -> Self {
        let mut document = serde_json::to_value(made).expect("a document is JSON");
        add_common_parts(&mut document);
        let hash = STANDARD.encode(Sha256::digest(STYLE));
        let policy = format!("default-src 'none'; style-src 'sha256-{hash}'; base-uri 'none'; frame-ancestors 'none'");
        let policy = HeaderValue::from_str(&policy).expect("a header");
        Self { json: document.to_string(), page: page(&document), policy }
    }
}

/// This OpenAPI document
#[utoipa::path(get, path = "/openapi.json", tag = "server", responses((status = 200, description = "OpenAPI 3.1", body = Object)))]
pub(crate) async fn openapi(Extension(document): Extension<Arc<ApiDocument>>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], document.json.clone()).into_response()
}

/// This API documentation as a page
#[utoipa::path(get, path = "/docs", tag = "server", responses((status = 200, description = "a page", content_type = "text/html", body = String)))]
pub(crate) async fn docs(Extension(document): Extension<Arc<ApiDocument>>) -> Response {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_SECURITY_POLICY, document.policy.clone());
    (headers, Html(document.page.clone())).into_response()
}

/// Adds what applies to every route: how keys are sent, and the common responses.
fn add_common_parts(document: &mut Value) {
    document["components"]["securitySchemes"] = json!({
        "bearer": { "type": "http", "scheme": "bearer" },
        "header": { "type": "apiKey", "in": "header", "name": "X-API-Key" },
        "query": { "type": "apiKey", "in": "query", "name": "api_key" },
    });
    document["security"] = json!([{ "bearer": [] }, { "header": [] }, { "query": [] }]);
    let problem = json!({ "application/json": { "schema": { "$ref": "#/components/schemas/Problem" } } });
    for (_, operation) in operations(document) {
        let open = operation.get("security").is_some();
        let bodied = operation.get("requestBody").is_some();
        let more = COMMON_RESPONSES
            .iter()
            .chain(AUTH_RESPONSES.iter().filter(|_| !open))
            .chain(BODY_RESPONSES.iter().filter(|_| bodied));
        let Some(responses) = operation["responses"].as_object_mut() else { continue };
        for (status, description) in more {
            let answer = || json!({ "description": description, "content": problem });
            responses.entry(*status).or_insert_with(answer);
        }
        for answer in responses.values_mut() {
            if answer["description"] == "" {
                answer["description"] = "done".into();
            }
        }
    }
}

/// Iterates over all operations with their method and path.
fn operations(document: &mut Value) -> impl Iterator<Item = (String, &mut Value)> {
    let paths = document["paths"].as_object_mut().into_iter().flatten();
    paths.flat_map(|(path, methods)| {
        let methods = methods.as_object_mut().into_iter().flatten();
        methods.map(move |(method, operation)| (format!("{} {path}", method.to_uppercase()), operation))
    })
}

fn page(document: &Value) -> String {
    let mut document = document.clone();
    let schemas = document["components"]["schemas"].clone();
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>leasehold API</title><style>{STYLE}</style></head><body><main><h1>leasehold API</h1><p>{}</p>\
         <p>Where keys are set, send one: <code>Authorization: Bearer KEY</code>, <code>X-API-Key: KEY</code>, or \
         <code>?api_key=KEY</code>. A viewer's key may read; changes need an operator's key. \
         For programs: <a href=\"/openapi.json\">/openapi.json</a>.</p>",
        escaped(&document["info"]["description"])
    );
    let mut tagged: Vec<(String, String, Value)> =
        operations(&mut document).map(|(title, op)| (escaped(&op["tags"][0]), title, op.clone())).collect();
    tagged.sort_by(|a, b| a.0.cmp(&b.0));
    let mut last = "";
    for (tag, title, operation) in &tagged {
        if tag != last {
            let _ = write!(html, "<h2>{tag}</h2>");
            last = tag;
        }
        let (method, path) = title.split_once(' ').unwrap_or(("", title));
        let _ = write!(html, "<section><h3><b>{method}</b> <code>{}</code></h3>", escape(path));
        let _ = write!(html, "<p>{}. {}</p>", escaped(&operation["summary"]), escaped(&operation["description"]));
        let mut rows: Vec<(String, String)> = Vec::new();
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            rows.push((text(&parameter["name"]), text(&parameter["description"])));
        }
        let body = &operation["requestBody"]["content"]["application/json"]["schema"]["$ref"];
        rows.extend(fields(&schemas, body));
        table(&mut html, "parameters", &rows);
        let answers = operation["responses"].as_object().into_iter().flatten();
        let own = answers.filter(|(status, _)| ["200", "409"].contains(&status.as_str()));
        for (status, answer) in own {
            let answered = &answer["content"]["application/json"]["schema"]["$ref"];
            let rows = if status == "200" { fields(&schemas, answered) } else { Vec::new() };
            table(&mut html, &format!("{status}: {}", text(&answer["description"])), &rows);
        }
        html.push_str("</section>");
    }
    html.push_str("<h2>errors</h2>");
    table(&mut html, "every error is a JSON object", &fields(&schemas, &json!("#/components/schemas/Problem")));
    let others = COMMON_RESPONSES.iter().chain(&AUTH_RESPONSES).chain(&BODY_RESPONSES);
    table(
        &mut html,
        "any route",
        &others.map(|(status, text)| ((*status).to_owned(), (*text).to_owned())).collect::<Vec<_>>(),
    );
    html + "</main></body></html>"
}

/// Returns the fields of a schema and of the schemas it includes.
fn fields(schemas: &Value, reference: &Value) -> Vec<(String, String)> {
    let name = reference.as_str().and_then(|text| text.rsplit('/').next()).unwrap_or("");
    let schema = &schemas[name];
    let mut rows: Vec<(String, String)> = Vec::new();
    for part in schema["allOf"].as_array().into_iter().flatten().chain([schema]) {
        rows.extend(fields_of(part));
        if part["$ref"].is_string() {
            rows.extend(fields(schemas, &part["$ref"]));
        }
    }
    rows
}

fn fields_of(schema: &Value) -> Vec<(String, String)> {
    let fields = schema["properties"].as_object().into_iter().flatten();
    fields.map(|(name, field)| (name.clone(), text(&field["description"]))).collect()
}

fn table(html: &mut String, title: &str, rows: &[(String, String)]) {
    let _ = write!(html, "<table><tr><th colspan=\"2\">{}</th></tr>", escape(title));
    for (name, description) in rows {
        let _ = write!(html, "<tr><td><code>{}</code></td><td>{}</td></tr>", escape(name), escape(description));
    }
    html.push_str("</table>");
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or("").to_owned()
}

fn escaped(value: &Value) -> String {
    escape(value.as_str().unwrap_or(""))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
