import { browser } from "./support.mjs";
const [,, out, theme="light", width="1440", height="900", ...actions] = process.argv;
const chrome = await browser();
const context = await chrome.newContext({ viewport: { width: +width, height: +height }, colorScheme: theme, deviceScaleFactor: 1 });
const page = await context.newPage();
page.on("console", m => { if (m.type()==="error"||m.type()==="warning") console.log("console:", m.text().slice(0,300)); });
page.on("pageerror", e => console.log("error:", String(e)));
const now = Date.now();
if (!process.env.NOSTUB) {
const json = (route, body) => route.fulfill({ status: 200, contentType: "application/json", body: JSON.stringify(body) });
await page.route("**/api/v1/alerts", r => json(r, { alerts: [
 { id:"a1", type:"lock_over_warning", level:"warning", message:"db-backup is held by backup@db-1 for 6m 12s, over the warning of 5m", value:372, name:"db-backup", owner:"backup@db-1", holder_id:"x", since_ms: now-72000, last_ms: now, count: 3, resolved_ms:null },
 { id:"a2", type:"dead_holder", level:"critical", message:"crawl-budget: its holder gave no sign of life for 5m", value:null, name:"crawl-budget", owner:"crawler", holder_id:"y", since_ms: now-400000, last_ms: now-300000, count: 1, resolved_ms: now-240000 }]}));
await page.route("**/api/v1/gpus", async r => { const live = await (await fetch(JSON.parse((await import("node:fs")).readFileSync("/tmp/scene.json")).url+"/api/v1/locks?prefix=gpu_lock")).json(); const of = id => live.locks.find(l=>l.name==="gpu_lock:"+id) ?? null; json(r, { driver:"nvml", message:null, gpus:[0,1,2,3].map(id=>({ host:"gpu-a", id, uuid:null, model:"A100 80GB", memory_total: 80*2**30, memory_used: (of(id)? 31+id*11:0.6)*2**30, lock: of(id) })) }); });
await page.route("**/api/v1/monitor", r => json(r, { leader:true, leader_owner:null, enabled:true, auto_recovery:false, levels:{warning_ms:60000,soft_ms:600000,hard_ms:900000} }));
await page.route("**/api/v1/journal", r => json(r, { entries:[{id:"j1",kind:"release",name:"order:4711",owner:"billing@vm",at_ms:now-3600000,why:"the store did not answer",holder_id:"abc"}] }));
await page.route("**/api/v1/audit*", r => json(r, { lines:[{at_ms:now-60000,outcome:"revoked",action:"revoke",name:"search-index",reason:"stuck on a bad page",who:"ops",key_id:"k",holder_id:"abc",owner:"indexer@vm (pid 5)",fence:1}] }));
}
await page.goto(process.env.PAGE ?? "http://127.0.0.1:9105/");
await page.waitForTimeout(2500);
for (const a of actions) { const [k,...v]=a.split("="); const val=v.join("=");
 if (k==="click") await page.click(val); else if (k==="wait") await page.waitForTimeout(+val); else if (k==="press") await page.keyboard.press(val); else if (k==="fill") { const [s,t]=val.split("|"); await page.fill(s,t);} else if (k==="hover") { const [x,y]=val.split(",").map(Number); await page.mouse.move(x,y);} else if (k==="eval") console.log(JSON.stringify(await page.evaluate(val))); }
await page.screenshot({ path: out, fullPage: process.env.FULL==="1" });
await chrome.close();
