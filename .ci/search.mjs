// Asks the search of a built site, by the script that readers' browsers run: prints the
// pages that it finds for each query, best first. `node .ci/search.mjs SITE QUERY ...`
import { readFileSync, readdirSync } from "node:fs";

const [site, ...queries] = process.argv.slice(2);
const folder = `${site}/assets/javascripts/workers/`;
const script = readdirSync(folder).find((name) => /^search.*\.js$/.test(name));
let handle, answer;
globalThis.self = globalThis;
globalThis.location = { href: `http://localhost/${script}` };
globalThis.addEventListener = (_, listener) => (handle = listener);
globalThis.postMessage = (message) => (answer = message.data);
(0, eval)(readFileSync(folder + script, "utf8"));

const SETUP = 0, QUERY = 2;
const index = JSON.parse(readFileSync(`${site}/search/search_index.json`));
await handle({ data: { type: SETUP, data: { ...index, options: {} } } });
const found = {};
for (const query of queries) {
  await handle({ data: { type: QUERY, data: query } });
  found[query] = answer.items.map(([first]) => first.location.split("#")[0]);
}
console.log(JSON.stringify(found));
