import type { Gpu } from "./api";
import { Dot } from "./dot";
import { gpus, overview, silentSince } from "./live";
import { Owner } from "./locks";
import { open } from "./state";
import { short } from "./owners";
import { now, span, tick } from "./time";

/** One card per device, grouped by host. */
export function Gpus() {
  const known = gpus.value;
  if (!known || known.gpus.length === 0) return null;
  const hosts = new Map<string, Gpu[]>();
  for (const gpu of known.gpus) {
    const host = gpu.host ?? "";
    hosts.set(host, [...(hosts.get(host) ?? []), gpu]);
  }
  return (
    <section class="panel gpus" aria-labelledby="gpus-title">
      <header class="panel-head">
        <h2 id="gpus-title">GPUs</h2>
        {known.driver === null && <span class="faint" title={known.message ?? ""}>from their locks: no driver on the server's machine</span>}
      </header>
      {[...hosts].map(([host, devices]) => (
        <div class="host" key={host}>
          {hosts.size > 1 || host ? <h3>{host || "unknown host"}</h3> : null}
          <ul>
            {devices.map((gpu) => <Device key={`${host} ${gpu.id}`} gpu={gpu} />)}
          </ul>
        </div>
      ))}
    </section>
  );
}

function Device({ gpu }: { gpu: Gpu }) {
  tick.value;
  const lock = gpu.lock;
  const name = lock?.name ?? `gpu_lock:${gpu.id}`;
  const used = gpu.memory_total ? (gpu.memory_used ?? 0) / gpu.memory_total : null;
  const at = overview.value?.store_down_since_ms ?? silentSince.value ?? now();
  return (
    <li class={lock?.held ? "gpu taken" : "gpu"}>
      <button type="button" onClick={() => open(name)}>
        <span class="title">
          <strong>GPU {gpu.id}</strong>
          <span class="faint">{gpu.model ?? ""}</span>
        </span>
        {used !== null && (
          <span class="memory">
            <span class="track" aria-hidden="true"><span class="fill" style={{ transform: `scaleX(${Math.min(1, used).toFixed(3)})` }} /></span>
            <span class="number">{gigabytes(gpu.memory_used)} of {gigabytes(gpu.memory_total)}</span>
          </span>
        )}
        {lock?.held ? (
          <span class="holder">
            <Dot owner={lock.owner ?? ""} /> <Owner owner={lock.owner ?? ""} />
            {lock.since_ms !== null && <span class="number faint">{span(at - lock.since_ms)}</span>}
          </span>
        ) : (
          <span class="holder free">free</span>
        )}
        {lock && lock.waiters.length > 0 && (
          <span class="queue">
            {lock.waiters.length} waiting: {short(lock.waiters[0]?.owner ?? "")}
            {lock.waiters.length > 1 ? " first" : ""}
          </span>
        )}
      </button>
    </li>
  );
}

const gigabytes = (bytes: number | null): string => (bytes === null ? "?" : `${(bytes / 2 ** 30).toFixed(bytes < 10 * 2 ** 30 ? 1 : 0)} GB`);
