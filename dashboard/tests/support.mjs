// A real server on a store of its own, real locks, a real browser.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import net from "node:net";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

export const root = join(dirname(fileURLToPath(import.meta.url)), "../..");
const target = process.env.CARGO_TARGET_DIR ?? join(root, "target");
const program = process.env.LEASEHOLD_PROGRAM ?? join(target, "debug/leasehold");
const browserPath = process.env.LEASEHOLD_CHROMIUM ?? "/usr/bin/chromium";

export const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

/** How long anything may take that is not measured: a machine may be cold, small, and busy with something else. */
export const PATIENCE = 60_000;

/** Waits until something is true. */
export async function until(what, look, within = PATIENCE) {
  const end = Date.now() + within;
  for (;;) {
    const found = await look();
    if (found) return found;
    if (Date.now() > end) throw new Error(`not within ${within} ms: ${what}`);
    await sleep(25);
  }
}

const undoing = new WeakMap();

/** Undoes what a test did when it is over, however it ends: the last first. */
function later(test, undo) {
  if (!undoing.has(test)) {
    undoing.set(test, []);
    test.after(async () => {
      for (const undo of undoing.get(test).reverse()) await undo();
    });
  }
  undoing.get(test).push(undo);
}

/** A store, a server and whatever was started on them; all of it ends with `end`. */
export class Place {
  children = new Set();
  over = false;
  dir = mkdtempSync(join(tmpdir(), "leasehold-page-"));

  static async start(test, { store, args = [] } = {}) {
    if (!existsSync(program)) throw new Error(`there is no ${program}: cargo build -p leasehold-cli --all-features`);
    const place = new Place();
    later(test, () => place.end());
    place.store = store ?? `sqlite:${join(place.dir, "locks.db")}`;
    await place.serve("127.0.0.1:0", args);
    return place;
  }

  /** Starts the server, which says where it listens, or ends and says why. */
  async serve(listen, args = []) {
    const server = this.spawn(["serve", "--json", "--listen", listen, "--audit", join(this.dir, "audit.jsonl"), ...args]);
    this.server = server;
    const [line] = await until("the server says where it is", () => /^.*\n/.exec(server.out) ?? (server.exitCode === null ? null : [""]));
    if (!line) throw new Error(`the server ended with ${server.exitCode}: ${server.said}`);
    this.url = JSON.parse(line).url;
  }

  spawn(args, options = {}) {
    const inherited = Object.entries(process.env).filter(([name]) => !name.startsWith("LEASEHOLD_"));
    const store = this.store ? { LEASEHOLD_STORE: this.store } : {};
    const env = { ...Object.fromEntries(inherited), ...store, XDG_STATE_HOME: this.dir, NO_COLOR: "1", RUST_LOG: "error", ...options.env };
    const child = spawn(program, args, { env, stdio: ["ignore", "pipe", "pipe"], cwd: this.dir });
    child.out = child.said = "";
    child.stdout.on("data", (text) => (child.out += text));
    child.stderr.on("data", (text) => (child.said += text));
    this.children.add(child);
    child.ended = once(child, "exit").then(() => this.children.delete(child));
    return child;
  }

  /** What `leasehold ARGS` says, to its end. */
  async run(args) {
    const child = this.spawn(args);
    await once(child, "close");
    if (child.exitCode !== 0) throw new Error(`leasehold ${args.join(" ")}: ${child.exitCode} ${child.said}`);
    return child.out;
  }

  /** Holds a lock, or waits for it, until it is told to stop. */
  hold(name, owner, seconds = 600, ttl = "30s") {
    return this.spawn(["run", "--owner", owner, "--ttl", ttl, name, "--", "sleep", String(seconds)]);
  }

  async stop(child, signal = "SIGTERM") {
    child.kill(signal);
    await child.ended;
  }

  async get(path, headers = {}) {
    const response = await fetch(this.url + path, { headers });
    return response.json();
  }

  async post(path, body, headers = {}) {
    const response = await fetch(this.url + path, { method: "POST", headers: { "Content-Type": "application/json", ...headers }, body: JSON.stringify(body) });
    return { status: response.status, body: await response.json() };
  }

  lock(name) {
    return this.get(`/api/v1/locks/${encodeURIComponent(name)}`);
  }

  async end() {
    this.over = true;
    const children = [...this.children];
    for (const child of children) child.kill();
    const all = Promise.all(children.map((child) => child.ended));
    const late = setTimeout(() => children.forEach((child) => child.kill("SIGKILL")), 8_000);
    await all;
    clearTimeout(late);
    rmSync(this.dir, { recursive: true, force: true });
  }
}

/** A Redis of one's own. */
export class Redis {
  static async start(test) {
    const redis = new Redis();
    redis.dir = mkdtempSync(join(tmpdir(), "leasehold-redis-"));
    later(test, async () => {
      await redis.stop();
      rmSync(redis.dir, { recursive: true, force: true });
    });
    do {
      redis.port = await new Promise((done) => {
        const probe = net.createServer().listen(0, "127.0.0.1", () => {
          const { port } = probe.address();
          probe.close(() => done(port));
        });
      });
      // Somebody else may have been quicker to take the port.
    } while (!(await redis.again()));
    redis.url = `redis://127.0.0.1:${redis.port}`;
    return redis;
  }

  /** Whether it is there; not if the port is taken. */
  async again() {
    const child = spawn("redis-server", ["--port", String(this.port), "--bind", "127.0.0.1", "--dir", this.dir, "--save", "", "--appendonly", "no"], { stdio: "ignore" });
    this.child = child;
    await once(child, "spawn");
    const gone = () => child.exitCode !== null || child.signalCode !== null;
    await until("redis answers", async () => gone() || (await this.say("INFO server").catch(() => "")).includes(`process_id:${child.pid}`));
    return !gone();
  }

  async say(line) {
    const socket = net.connect(this.port, "127.0.0.1");
    socket.setEncoding("utf8");
    try {
      await once(socket, "connect");
      socket.write(`${line}\r\n`);
      const [answer] = await once(socket, "data");
      return answer;
    } finally {
      socket.destroy();
    }
  }

  async stop() {
    const { child } = this;
    if (child && child.exitCode === null && child.signalCode === null) {
      child.kill("SIGKILL");
      await once(child, "exit");
    }
  }
}

export async function browser() {
  return chromium.launch({
    executablePath: browserPath,
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"],
  });
}

/** A page that counts what must never happen: violations of the policy, errors, requests to anywhere else. */
export async function openPage(chrome, url, options = {}) {
  const { hash = "", script, ...look } = options;
  const context = await chrome.newContext({ viewport: { width: 1440, height: 900 }, colorScheme: "light", ...look });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE);
  if (script) await page.addInitScript(script);
  const seen = { violations: [], errors: [], foreign: [] };
  page.on("console", (message) => {
    const text = message.text();
    if (/Content Security Policy|Trusted ?Type/i.test(text)) seen.violations.push(text);
    else if (message.type() === "error" && !/Failed to load resource/.test(text)) seen.errors.push(text);
  });
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("request", (request) => {
    if (!request.url().startsWith(url)) seen.foreign.push(request.url());
  });
  page.seen = seen;
  page.begun = Date.now();
  await page.goto(`${url}/${hash}`, { waitUntil: "commit" });
  return page;
}

/** The row of a lock in the table. */
export const row = (page, name) => page.locator(".grid .body .row").filter({ has: page.locator(".cell.name .text", { hasText: new RegExp(`^${name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}$`) }) });

/** Nothing happened that must never happen. */
export function clean(page) {
  const { violations, errors, foreign } = page.seen;
  if (violations.length + errors.length + foreign.length > 0) throw new Error(JSON.stringify(page.seen, null, 2));
}
