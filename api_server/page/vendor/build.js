// Bundles entry.js into ../assets/vendor.js and writes the licences of its modules beside it.
import { readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const ASSETS = "../assets/";
const MODULES = ["dompurify", "highlight.js", "marked"];

const modules = MODULES.map((name) => {
  const folder = `node_modules/${name}/`;
  const { version, license } = JSON.parse(readFileSync(`${folder}package.json`, "utf8"));
  return { title: `${name} ${version} (${license.replace(/[()]/g, "")})`, text: readFileSync(`${folder}LICENSE`, "utf8") };
});

await build({
  entryPoints: ["entry.js"],
  outfile: `${ASSETS}vendor.js`,
  bundle: true,
  format: "esm",
  minify: true,
  target: "es2022",
  legalComments: "none", // the licences are in vendor-licenses.txt
  banner: { js: `/* ${modules.map((each) => each.title).join(", ")}; vendor-licenses.txt */` },
});
writeFileSync(
  `${ASSETS}vendor-licenses.txt`,
  modules.map(({ title, text }) => `${title}\n\n${text.trim()}\n`).join(`\n${"-".repeat(72)}\n\n`),
);
