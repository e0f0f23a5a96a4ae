import { keyWanted, remember } from "./api";
import { alerts, overview, silentSince, stop, streaming } from "./live";
import { search } from "./state";
import { theme, toggle } from "./theme";

export function Bar() {
  const known = overview.value;
  return (
    <header class="bar">
      <div class="brand">
        <img src="/assets/icon.svg" alt="" width="26" height="26" />
        <span class="word">leasehold</span>
      </div>
      {known && (
        <div class="where" title={`${known.store}, namespace ${known.namespace || "(none)"}, server ${known.version}`}>
          <span class="mono store"><bdi>{known.store}</bdi></span>
          {known.namespace !== "leasehold" && <span class="tag">{known.namespace || "no namespace"}</span>}
        </div>
      )}
      <Pill />
      <div class="spacer" />
      <Live />
      <label class="search">
        <span class="unseen">Search locks and owners</span>
        <svg width="14" height="14" viewBox="0 0 16 16" aria-hidden="true"><circle cx="7" cy="7" r="4.6" /><path d="M10.6 10.6 L14 14" /></svg>
        <input
          id="search"
          type="search"
          autocomplete="off"
          spellcheck={false}
          placeholder="Search locks, owners"
          value={search.value}
          onInput={(event) => (search.value = event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Escape") {
              search.value = "";
              event.currentTarget.blur();
              event.stopPropagation();
            }
          }}
        />
        <kbd aria-hidden="true">/</kbd>
      </label>
      <button type="button" class="icon round" onClick={toggle} aria-label={theme.value === "dark" ? "Light theme" : "Dark theme"} title={theme.value === "dark" ? "Light" : "Dark"}>
        {theme.value === "dark" ? (
          <svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true"><circle cx="8" cy="8" r="3.2" /><path d="M8 1v1.6M8 13.4V15M1 8h1.6M13.4 8H15M3 3l1.2 1.2M11.8 11.8 13 13M13 3l-1.2 1.2M4.2 11.8 3 13" /></svg>
        ) : (
          <svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true"><path d="M13.4 9.8A5.8 5.8 0 0 1 6.2 2.6a5.8 5.8 0 1 0 7.2 7.2Z" /></svg>
        )}
      </button>
      {known?.keyed && (
        <div class="who">
          <span class="tag" title={known.role === "viewer" ? "This key can only read" : "This key can evict holders"}>{known.role}</span>
          <button type="button" class="button small" onClick={logOut}>Log out</button>
        </div>
      )}
    </header>
  );
}

function logOut(): void {
  stop();
  remember("");
  keyWanted.value = "";
}

/** The status and its reasons. */
function Pill() {
  const known = overview.value;
  if (!known) return <span class="pill">…</span>;
  const firing = (alerts.value ?? []).filter((alert) => alert.resolved_ms === null);
  const reasons = [...known.reasons];
  if (firing.length > 0 && !reasons.some((reason) => /alert/.test(reason))) {
    reasons.push(firing.length === 1 ? "1 alert" : `${firing.length} alerts`);
  }
  const worst = known.status === "healthy" && firing.length > 0 ? "degraded" : known.status;
  const text = silentSince.value ? "unknown" : worst;
  const why = silentSince.value ? "the server does not answer" : reasons.join("; ");
  return (
    <span class={`pill ${text}`} role="status">
      <span class="mark" aria-hidden="true">{text === "healthy" ? "✓" : text === "degraded" ? "!" : "✕"}</span>
      <span>
        {text}
        {why && <span class="why">: {why}</span>}
      </span>
    </span>
  );
}

function Live() {
  const on = streaming.value && silentSince.value === null;
  return (
    <span class={on ? "live on" : "live"} title={on ? "Events arrive as they happen" : "The event stream is interrupted; reconnecting"}>
      <span class="beacon" aria-hidden="true" />
      {on ? "live" : "not live"}
    </span>
  );
}
