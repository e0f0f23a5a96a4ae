import { useEffect } from "preact/hooks";
import { keyWanted } from "./api";
import { Bar } from "./bar";
import { Drawer } from "./drawer";
import { Empty } from "./empty";
import { Evict } from "./evict";
import { Gpus } from "./gpus";
import { changes, lanes, locks, overview, silentSince } from "./live";
import { Login } from "./login";
import { Numbers } from "./numbers";
import { Records } from "./records";
import { Side } from "./side";
import { close, evicting, notice, opened } from "./state";
import { narrow } from "./theme";
import { Timeline } from "./timeline/timeline";
import { clock, now, span, tick } from "./time";

export function App() {
  useEffect(() => {
    const keys = (event: KeyboardEvent) => {
      const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLTextAreaElement;
      if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !evicting.value) {
        event.preventDefault();
        document.getElementById("search")?.focus();
      } else if (event.key === "Escape" && opened.value !== null && !evicting.value) {
        close();
      }
    };
    document.addEventListener("keydown", keys);
    return () => document.removeEventListener("keydown", keys);
  }, []);

  if (keyWanted.value !== null) return <Login why={keyWanted.value} />;
  changes.value;
  const known = overview.value;
  const empty = known !== null && known.looked_ms !== null && locks.size === 0 && lanes.size === 0;
  const stale = Boolean(known?.store_down_since_ms || silentSince.value);
  return (
    <>
      {!empty && <a class="skip" href="#locks-title" onClick={skip}>Skip to the locks</a>}
      <Bar />
      <Trouble />
      <main class={stale ? "stale" : ""} aria-busy={known === null}>
        <h1 class="unseen">Locks of {known?.store ?? "this store"}</h1>
        <Numbers />
        <div class="columns">
          <div class="wide">
            {empty ? (
              <Empty />
            ) : (
              <>
                {!narrow.value && <Timeline />}
                {narrow.value && <Side part="alerts" />}
              </>
            )}
            <Records empty={empty} />
            <Gpus />
          </div>
          <Side part={narrow.value ? "rest" : "all"} />
        </div>
      </main>
      {opened.value !== null && <Drawer key={opened.value} name={opened.value} />}
      {evicting.value !== null && <Evict key={evicting.value.holderId} target={evicting.value} />}
      <div class="notices" role="status" aria-live="polite">
        {notice.value && <p class={notice.value.bad ? "notice bad" : "notice"}>{notice.value.text}</p>}
      </div>
    </>
  );
}

function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("locks-title")?.focus();
}

/** The banner while the server or the store does not answer. */
function Trouble() {
  const down = overview.value?.store_down_since_ms ?? null;
  const silent = silentSince.value;
  if (down === null && silent === null) return null;
  tick.value;
  const since = silent ?? down ?? now();
  const what = silent !== null ? "This server does not answer" : "The store does not answer";
  const then = silent !== null ? "retrying" : "holders keep their locks until their leases end";
  return (
    <div class="trouble" role="alert">
      <strong>{what}</strong> since {clock(since)} ({span(now() - since)}); {then}. This page shows the last known state.
    </div>
  );
}
