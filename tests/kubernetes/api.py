"""A stand-in for the API server: Jobs, pods, Services and a few other kinds in memory, served over HTTP to a real kubectl.

It does what kubectl asks of it: discovery, the OpenAPI document from which kubectl learns that the server checks fields,
create (also as a dry run), get, list by label, delete, reviews of the user's rights. Manifests are checked against the API's
schemas. It has one user, no admission plug-ins and no watches.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

VERSION = "1.32"
KINDS = {  # plural: (path of the group, kind, whether it belongs to a namespace)
    "pods": ("api/v1", "Pod", True),
    "services": ("api/v1", "Service", True),
    "secrets": ("api/v1", "Secret", True),
    "persistentvolumeclaims": ("api/v1", "PersistentVolumeClaim", True),
    "nodes": ("api/v1", "Node", False),
    "namespaces": ("api/v1", "Namespace", False),
    "jobs": ("apis/batch/v1", "Job", True),
    "selfsubjectaccessreviews": ("apis/authorization.k8s.io/v1", "SelfSubjectAccessReview", False),
}
GROUPS = ("api/v1", "apis/batch/v1", "apis/authorization.k8s.io/v1")
NAMED = {"POST": "create", "DELETE": "delete", "GET": "get", "PATCH": "patch"}
METHODS = {"create": "POST", "delete": "DELETE", "get": "GET", "list": "GET", "patch": "PATCH"}  # by verb


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Refusal(Exception):
    """What the server answers instead of an object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        self.body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
        self.body["message"] = message
        super().__init__(message)


class Store:
    """All objects by (plural, namespace, name), and the accidents of the server that a test can cause."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict] = {}
        self.lock = threading.RLock()
        self.down = False  # every connection is closed without an answer
        self.lose_replies = False  # objects are created, but the answer is lost
        self.forbidden: set[tuple[str, str]] = set()  # pairs (method or verb, plural)
        self.requests: list[str] = []
        for name in ("kube-system", "default", "research"):
            self.put("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def may(self, verb: str, plural: str) -> bool:
        """Whether the user may do this."""
        return not {(verb, plural), (METHODS[verb], plural)} & self.forbidden

    def all(self, plural: str) -> list[dict]:
        with self.lock:
            return [item for (kind, _, _), item in self.objects.items() if kind == plural]

    def put(self, plural: str, item: dict) -> dict:
        """Store a new object. Raises Refusal if its name is taken or its fields are not those of the schema."""
        meta = item["metadata"]
        key = (plural, meta.get("namespace", ""), meta["name"])
        with self.lock:
            if key in self.objects:
                raise Refusal(409, "AlreadyExists", f'{plural} "{meta["name"]}" already exists')
            meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "resourceVersion": "1"}
            self.objects[key] = item
        return item

    def remove(self, plural: str, item: dict) -> None:
        self.objects.pop((plural, item["metadata"].get("namespace", ""), item["metadata"]["name"]), None)


def check_schema(item: dict) -> None:
    """Raise Refusal if an object has fields or values that the API of VERSION has not."""
    import kubernetes_validate

    try:
        kubernetes_validate.validate(item, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise Refusal(422, "Invalid", f"{item['kind']} is invalid: {error.message}") from error


class Handler(BaseHTTPRequestHandler):
    store: Store
    protocol_version = "HTTP/1.1"

    def log_message(self, *given) -> None:
        pass

    def answer(self, body: dict, code: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_request(self) -> None:
        store = self.store
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        store.requests.append(f"{self.command} {self.path}")
        if store.down:
            self.close_connection = True
            self.connection.close()
            return
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        try:
            found = about(url.path) or self.object_of(url.path, query, body)
        except Refusal as refusal:
            self.answer(refusal.body, refusal.body["code"])
            return
        if store.lose_replies and self.command == "POST" and "dryRun" not in query:
            self.close_connection = True
            self.connection.close()
            return
        self.answer(found, 201 if self.command == "POST" else 200)

    do_GET = do_POST = do_PATCH = do_DELETE = handle_request

    def object_of(self, path: str, query: dict, body: dict) -> dict:
        """Carry out a request on an object or a collection."""
        match = re.fullmatch(r"/(api/v1|apis/[a-z.0-9]+/v1)(?:/namespaces/([^/]+))?/([a-z]+)(?:/([^/]+))?", path)
        if not match or match[3] not in KINDS or KINDS[match[3]][0] != match[1]:
            raise Refusal(404, "NotFound", f"the server could not find the requested resource {path}")
        group, namespace, plural, name = match.groups()
        verb = "list" if (self.command, name) == ("GET", None) else NAMED[self.command]
        if not self.store.may(verb, plural):
            raise Refusal(
                403, "Forbidden", f'{plural} is forbidden: User "me" cannot do this in the namespace "{namespace}"'
            )
        with self.store.lock:
            if self.command == "POST":
                return self.create(plural, namespace, query, body)
            if name is None:
                wanted = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
                items = [
                    item
                    for item in self.store.all(plural)
                    if namespace in (None, item["metadata"].get("namespace"))
                    and wanted.items() <= item["metadata"].get("labels", {}).items()
                ]
                kind = KINDS[plural][1]
                about = {
                    "apiVersion": group.split("/", 1)[1],
                    "kind": f"{kind}List",
                    "metadata": {"resourceVersion": "1"},
                }
                return {**about, "items": items}
            key = (plural, namespace or "", name)
            if key not in self.store.objects:
                raise Refusal(404, "NotFound", f'{plural} "{name}" not found')
            item = self.store.objects[key]
            if self.command == "DELETE":
                if plural == "pods":
                    item["metadata"].setdefault("deletionTimestamp", now())
                else:
                    self.store.remove(plural, item)
            return item

    def create(self, plural: str, namespace: str, query: dict, item: dict) -> dict:
        if plural == "selfsubjectaccessreviews":
            check_schema(item)
            asked = item["spec"]["resourceAttributes"]
            return item | {"status": {"allowed": self.store.may(asked["verb"], asked["resource"])}}
        item["metadata"].setdefault("namespace", namespace)
        if item["metadata"]["namespace"] not in ("research", "default"):
            raise Refusal(404, "NotFound", f'namespaces "{item["metadata"]["namespace"]}" not found')
        check_schema(item)
        if "dryRun" in query:
            item["metadata"]["uid"] = "dry"
            return item
        return self.store.put(plural, item)


def about(path: str) -> dict | None:
    """Answer a question about the API itself; None for any other path."""
    if path == "/version":
        return {"major": "1", "minor": VERSION.split(".")[1], "gitVersion": f"v{VERSION}.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for _, name, number in (group.split("/") for group in GROUPS[1:]):
            version = {"groupVersion": f"{name}/{number}", "version": number}
            groups.append({"name": name, "versions": [version], "preferredVersion": version})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/openapi/v3":
        return {"paths": {group: {"serverRelativeURL": f"/openapi/v3/{group}"} for group in GROUPS}}
    group = path.strip("/")
    if group in GROUPS:
        verbs = ["create", "delete", "get", "list", "patch"]
        resources = [
            {"name": plural, "singularName": kind.lower(), "namespaced": inside, "kind": kind, "verbs": verbs}
            for plural, (own, kind, inside) in KINDS.items()
            if own == group
        ]
        return {"kind": "APIResourceList", "groupVersion": group.split("/", 1)[1], "resources": resources}
    if group.removeprefix("openapi/v3/") in GROUPS:
        return openapi(group.removeprefix("openapi/v3/"))
    return None


def openapi(group: str) -> dict:
    """Return the document from which kubectl learns that the server knows dry runs and checks fields."""
    parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in ("dryRun", "fieldValidation")]
    name, _, version = group.split("/", 1)[1].rpartition("/")
    paths = {}
    for plural, (own, kind, _) in KINDS.items():
        if own == group:
            about = {"group": name, "version": version, "kind": kind}
            operation = {"parameters": parameters, "x-kubernetes-group-version-kind": about, "responses": {}}
            paths[f"/{group}/namespaces/{{namespace}}/{plural}/{{name}}"] = {"patch": operation}
    return {"openapi": "3.0.0", "info": {"title": "stand-in", "version": VERSION}, "paths": paths}


def serve(store: Store) -> ThreadingHTTPServer:
    """Serve a store on a free port of this machine, in threads."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"store": store}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
