// What the page loads with the first formula.
export { default as temml } from "temml";
