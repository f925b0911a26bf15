"""Secrets are recognized by name, by value and by form; code that only mentions tokens is not changed."""

import pytest

from titan_hydra.core.base.redact import redact, secrets_in, sureness
from titan_hydra.core.job.rules.checks import check
from titan_hydra.experiments.compose.compose import compose_job

OTHER = "fedcba9876543210fedcba9876543210fedcba98"
WANDB, HF = "0123456789abcdef0123456789abcdef01234567", "hf_" + "aB3" * 11
ENVIRONMENT = {
    "WANDB_API_KEY": WANDB,
    "MY_SECRET": "correct horse battery",
    "SHORT_TOKEN": "abc",
    "PATH": "/usr/bin:/usr/local/bin",
}


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("db_password", True),
        ("OPENAI_APIKEY", True),
        *(
            (name, True)
            for name in (
                "DB_PASS",
                "PGPASSWORD",
                "MYSQL_PWD",
                "SSHPASS",
                "SLURM_JWT",
                "DOCKER_AUTH_CONFIG",
                "apiKey",
                "userToken",
            )
        ),
        *(
            (name, False)
            for name in (
                "PWD",
                "OLDPWD",
                "BYPASS",
                "PASS_THROUGH",
                "SSH_AUTH_SOCK",
                "COMPASS",
                "KeyError",
                "max_tokens",
            )
        ),
        ("MYTOKEN", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("KEYBOARD", False),
        ("OMP_NUM_THREADS", False),
        ("XPATH", False),
    ],
)
def test_names(name, secret):
    assert bool(sureness(name)) is secret


@pytest.mark.parametrize(
    "line",
    [
        f"+login('{WANDB}')",
        "+# correct horse battery staple",
        f"+HF_TOKEN={HF}",
        f'-token = "{HF}"',
        '+api_key: "s3cretpassw0rd"',
        "+GITHUB_TOKEN=ghp_" + "a1" * 18,
        "+AKIAIOSFODNN7EXAMPLE",
        "+password='hunter2hunter2'",
        "export DB_PASSWORD=hunter2hunter2",
        "export MY_PASSWORD=correcthorsebattery",
        "+cluster.environment.WANDB_API_KEY=deadbeefcafebabedeadbeefcafebabedeadbeef",
        f'os.environ["WANDB_API_KEY"] = "{OTHER}"',
        f"os.environ['HF_TOKEN'] = '{OTHER}'",
        f'config["api_token"] = "{OTHER}"',
        'DB_PASS = "s3cretpassw0rd"',
        "export PGPASSWORD=hunter2hunter2",
        "export MYSQL_PWD=hunter2hunter2",
        "SSHPASS=hunter2hunter2 sshpass -e",
        f"--container-image=me:{OTHER}@registry.site#torch",
        "postgres://me:s3cretpassw0rd@host/db",
        '"Authorization": "Bearer abcdefgh12345678"',
        "-H 'Authorization: Basic czNjcmV0cGFzc3cwcmQ='",
        "curl -H 'x: Bearer abcdefgh12345678'",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJtZSJ9.czNjcmV0",
        "ASIAIOSFODNN7EXAMPLE",
        'password = "correct horse of mine"',
        "SLURM_JWT=eyJhbGciOiJIUzI1NiJ9",
        'secret: "s3cretpassw0rd"',
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----",
        '{"client_secret": "abcdefgh12345678"}',
    ],
)
def test_a_secret_is_gone(line):
    out = redact(f"before\n{line}\nafter", ENVIRONMENT)
    assert "[redacted" in out and out.startswith("before\n") and out.endswith("\nafter")
    for secret in (
        WANDB,
        "correct horse",
        HF,
        "s3cretpassw0rd",
        "correcthorse",
        "deadbeef",
        "a1a1a1",
        "AKIAIOS",
        "ASIAIOS",
        "hunter2",
        "b3Blbn",
        "abcdefgh1234",
        OTHER,
        "czNjcmV0",
        "eyJhb",
        "horse",
    ):
        assert secret not in out


@pytest.mark.parametrize(
    "line",
    [
        "+token = tokenizer.encode(text)",
        "+    max_tokens=batch.tokens.numel()",
        "+index 0123456789abcdef0123456789abcdef0123456a..b",
        "+key = sorted_names[0]",
        "+    eos_token: int = 128001",
        "+token=args.token",
        "+PATH=/usr/bin:/usr/local/bin",
        '+x = key("how checkpoints are written")',
        '+token = os.environ["HF_TOKEN"]',
        '+    raise KeyError("no such thing here")',
        '+eos_token = "<|end|>"',
        "+if key in known:",
        '+("HF_TOKEN", True), ("KEYBOARD", False)',
        "+class Token(Protocol):",
    ],
)
def test_code_is_left_alone(line):
    assert redact(line, ENVIRONMENT, code=True) == line


@pytest.mark.parametrize(
    "line",
    [
        '+password = "x"',
        "+    if password == 'abc':",
        '+os.environ.setdefault("MY_SECRET", "short")',
        '+headers["Authorization"] = f"Basic {x} abc"',
        '+secret: str = "abc"  # "short"',
        "+password = (\n+    'abc def'\n+)",
        '+PASSPHRASE = """\n+abc def\n+"""',
        '-  db_password: "abc"',
        '+login(user="me", password="abc")',
        "+key = 'abc_def_1'",
        "+password: |\n+  abc def",
        '+password = """abc\n+abc def"""',
        '+password = "abc \\\n+abc"',
    ],
)
def test_a_diff_has_no_value_of_a_line_that_names_a_secret(line):
    """Short values and phrases are removed too, as nobody needs them to see which code ran."""
    out = redact(f"+before = 'abc'\n{line}\n+after = 'abc'", {}, code=True)
    first, *middle, last = out.split("\n")
    assert (first, last) == ("+before = 'abc'", "+after = 'abc'")
    assert "[redacted]" in out and not any(word in "\n".join(middle) for word in ("abc", "short", '"x"')), out


@pytest.mark.parametrize(
    "line",
    [
        "http_proxy=http://proxy:8080/",
        "ssh://git@github.com:22/a",
        "http://me:$PASSWORD@proxy",
        "the bearer of good tidings",
        "http://{user}:{password}@host",
        'export HF_TOKEN="$(cat ~/.hf/token)"',
        'export DB_PASS="$MINE"',
        "export HF_TOKEN=$TOKEN_OF_MINE",
        "export HF_TOKEN=$(cat ~/.hf/token)",
        "export HF_TOKEN_PATH=/secrets/of/mine",
        "with another token: learned",
        "key=learned-embeddings",
        "PYTORCH_KERNEL_CACHE_PATH=./cache",
    ],
)
def test_what_is_no_secret_is_left_alone(line):
    assert redact(line, ENVIRONMENT) == line


def test_a_configuration_with_secrets_is_refused_without_showing_them(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", WANDB)
    job = compose_job("cluster=slurm")
    job.cluster.environment = {"HF_TOKEN": "whatever", "NCCL_DEBUG": "INFO"}
    job.cluster.setup = ["module load cuda", f"export WANDB_API_KEY={WANDB}"]
    job.notes = f"with {HF}"
    faults = check(job)
    assert {fault.key for fault in faults} == {"cluster.environment.HF_TOKEN", "cluster.setup", "notes"}
    text = " ".join(map(str, faults))
    assert not any(secret in text for secret in ("whatever", WANDB, HF))
    assert (
        list(
            secrets_in(
                {
                    "cluster": {
                        "environment": {"TOKENIZERS_PARALLELISM": "false"},
                        "setup": ["export HF_TOKEN=$(cat ~/.hf)"],
                    }
                }
            )
        )
        == []
    )
