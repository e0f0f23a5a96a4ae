//! The OpenAPI document, made from the routes, and a page of it for people: no scripts, nothing from
//! elsewhere.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::Extension;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{Html, IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Made once, when the server starts.
pub(crate) struct Document {
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

/// What any route may answer besides its own.
const ANYWHERE: [(&str, &str); 4] = [
    ("400", "the request cannot be understood"),
    ("421", "`foreign_host`: addressed to a name the server does not know as its own"),
    ("500", "an error of the server; its log says more"),
    ("503", "`store_unreachable` or `shutting_down`: try again later"),
];
/// Where keys are needed.
const KEYED: [(&str, &str); 3] = [
    ("401", "`no_key` or `wrong_key`"),
    ("403", "`needs_operator`: this key may only look; `cross_site`: sent by a foreign page"),
    ("429", "`too_many_failures`: too many wrong keys from this address"),
];
const BODIED: [(&str, &str); 3] = [
    ("408", "the body came too slowly"),
    ("413", "the body is too long"),
    ("415", "the body does not say that it is JSON"),
];

impl Document {
    pub(crate) fn new(made: &utoipa::openapi::OpenApi) -> Self {
        let mut document = serde_json::to_value(made).expect("a document is JSON");
        complete(&mut document);
        let hash = STANDARD.encode(Sha256::digest(STYLE));
        let policy = format!("default-src 'none'; style-src 'sha256-{hash}'; base-uri 'none'; frame-ancestors 'none'");
        let policy = HeaderValue::from_str(&policy).expect("a header");
        Self { json: document.to_string(), page: page(&document), policy }
    }
}

/// This document
#[utoipa::path(get, path = "/openapi.json", tag = "server", responses((status = 200, description = "OpenAPI 3.1", body = Object)))]
pub(crate) async fn openapi(Extension(document): Extension<Arc<Document>>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], document.json.clone()).into_response()
}

/// The same for people
#[utoipa::path(get, path = "/docs", tag = "server", responses((status = 200, description = "a page", content_type = "text/html", body = String)))]
pub(crate) async fn docs(Extension(document): Extension<Arc<Document>>) -> Response {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_SECURITY_POLICY, document.policy.clone());
    (headers, Html(document.page.clone())).into_response()
}

/// Adds what holds for every route: how keys are sent, and what may be answered anywhere.
fn complete(document: &mut Value) {
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
        let more = ANYWHERE.iter().chain(KEYED.iter().filter(|_| !open)).chain(BODIED.iter().filter(|_| bodied));
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

/// Every operation with its method and path.
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
         <code>?api_key=KEY</code>. A viewer's key may look; what changes something needs an operator's. \
         The same for programs: <a href=\"/openapi.json\">/openapi.json</a>.</p>",
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
        table(&mut html, "it takes", &rows);
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
    table(&mut html, "every error is JSON", &fields(&schemas, &json!("#/components/schemas/Problem")));
    let others = ANYWHERE.iter().chain(&KEYED).chain(&BODIED);
    table(
        &mut html,
        "any route",
        &others.map(|(status, text)| ((*status).to_owned(), (*text).to_owned())).collect::<Vec<_>>(),
    );
    html + "</main></body></html>"
}

/// The fields of a schema, and of those it is made of.
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
