// Bundles entry.js into ../assets/vendor.js, entry-math.js into vendor-math.js, and writes the licences of its modules beside it.
import { readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const ASSETS = "../assets/";
const MODULES = ["dompurify", "highlight.js", "marked", "temml"];

const modules = MODULES.map((name) => {
  const folder = `node_modules/${name}/`;
  const { version, license } = JSON.parse(readFileSync(`${folder}package.json`, "utf8"));
  return { title: `${name} ${version} (${license.replace(/[()]/g, "")})`, text: readFileSync(`${folder}LICENSE`, "utf8") };
});

// The Content-Security-Policy refuses style attributes, which Temml sets in a few places, but not properties of `style`.
const styleProperties = {
  name: "style properties",
  setup({ onLoad }) {
    onLoad({ filter: /temml\.m?js$/ }, ({ path }) => ({
      contents: readFileSync(path, "utf8").replace(
        /\.setAttribute\("style", "([\w-]+): ?([\w ]+);?"\)/g,
        (_, name, value) => `.style["${name}"] = "${value}"`,
      ),
    }));
  },
};

await build({
  entryPoints: { vendor: "entry.js", "vendor-math": "entry-math.js" },
  outdir: ASSETS,
  bundle: true,
  format: "esm",
  minify: true,
  plugins: [styleProperties],
  target: "es2022",
  legalComments: "none", // the licences are in vendor-licenses.txt
  banner: { js: `/* ${modules.map((each) => each.title).join(", ")}; vendor-licenses.txt */` },
});
// The style sheet of Temml for the mathematical fonts of the system: no font is loaded.
const style = readFileSync("node_modules/temml/dist/Temml-Local.css", "utf8")
  .replace(/@font-face\s*{[^}]*}/, "")
  .replace(/\/\*[^]*?\*\//g, "")
  .replace(/\n\s*\n/g, "\n");
writeFileSync(`${ASSETS}vendor-math.css`, `/* ${modules.at(-1).title}; vendor-licenses.txt */\n${style.trim()}\n`);
writeFileSync(
  `${ASSETS}vendor-licenses.txt`,
  modules.map(({ title, text }) => `${title}\n\n${text.trim()}\n`).join(`\n${"-".repeat(72)}\n\n`),
);
