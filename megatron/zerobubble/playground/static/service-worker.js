// Keeps all files of the page, so that it works without a network after the first visit, and says again that nothing is loaded from
// elsewhere. The build (tools/docs/playground_app.py) puts BUILD, a name for these files, and FILES before this.

const NAME = `playground-${BUILD}`;
const POLICY = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'";

self.addEventListener("install", (event) => {
  const requests = FILES.map((name) => new Request(name, { cache: "no-cache" }));
  event.waitUntil(caches.open(NAME).then((cache) => cache.addAll(requests)));
});

self.addEventListener("activate", (event) => {
  const old = (name) => name.startsWith("playground-") && name !== NAME;
  const drop = caches.keys().then((names) => Promise.all(names.filter(old).map((name) => caches.delete(name))));
  event.waitUntil(drop.then(() => self.clients.claim()));
});

self.addEventListener("fetch", (event) => {
  const { origin } = new URL(event.request.url);
  if (event.request.method === "GET" && origin === location.origin) event.respondWith(answer(event.request));
});

async function answer(request) {
  const cache = await caches.open(NAME);
  const kept = await cache.match(request, { ignoreSearch: true });
  if (!kept) return fetch(request);
  if (request.destination !== "worker") return kept;
  const headers = new Headers(kept.headers);
  headers.set("content-security-policy", POLICY); // a worker does not have that of its page
  return new Response(kept.body, { headers });
}
