// Shows /openapi.json: each operation with the fields of its body, its parameters and its answers.
const byId = (id) => document.getElementById(id);

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function table(head, rows) {
  const line = (cells, tag) => element("tr", "", ...cells.map((cell) => element(tag, cell)));
  return element("table", "", line(head, "th"), ...rows.map((row) => line(row, "td")));
}

function follow(schema, schemas) {
  const name = schema.$ref ? schema.$ref.split("/").pop() : null;
  return name ? schemas[name] ?? {} : schema;
}

function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(kind).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return `list of ${schema.items ? kind(schema.items) : "anything"}`;
  return schema.type ?? "anything";
}

function fields(schema, schemas) {
  const found = follow(schema, schemas);
  const required = new Set(found.required ?? []);
  return Object.entries(found.properties ?? {}).map(([name, field]) => [
    name, kind(field), required.has(name) ? "required" : field.default == null ? "" : JSON.stringify(field.default),
  ]);
}

function operation(path, method, description, schemas) {
  const title = element("summary", "", element("b", method.toUpperCase()), element("code", path));
  title.append(` ${description.summary ?? ""}`);
  const body = description.requestBody?.content?.["application/json"]?.schema;
  const parts = [];
  if (description.parameters) {
    const rows = description.parameters.map((each) => [each.name, each.in, kind(each.schema ?? {}), each.description ?? ""]);
    parts.push(element("h3", "Parameters"), table(["name", "in", "type", ""], rows));
  }
  if (body) {
    parts.push(element("h3", "Body"));
    const known = follow(body, schemas).description;
    if (known) parts.push(element("p", known));
    parts.push(table(["field", "type", "default"], fields(body, schemas)));
  }
  const statuses = Object.entries(description.responses).map(([status, answer]) => [status, answer.description]);
  parts.push(element("h3", "Answers"), table(["status", ""], statuses));
  const answer = description.responses["200"]?.content?.["application/json"]?.schema;
  if (answer) parts.push(table(["field of the answer", "type", ""], fields(answer, schemas)));
  return element("details", "", title, ...parts);
}

async function show(key) {
  const answer = await fetch("openapi.json", key ? { headers: { Authorization: `Bearer ${key}` } } : {});
  byId("login").hidden = answer.status !== 401;
  if (!answer.ok) {
    byId("about").textContent = answer.status === 401 ? "This server asks for an API key." : `Status ${answer.status}`;
    return;
  }
  const document_ = await answer.json();
  byId("about").textContent = `${document_.info.title} ${document_.info.version}, OpenAPI ${document_.openapi}`;
  const schemas = document_.components.schemas;
  const all = Object.entries(document_.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, description]) => operation(path, method, description, schemas)));
  byId("operations").replaceChildren(...all);
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  show(byId("key").value);
});
show("");
