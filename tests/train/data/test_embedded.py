from titan_hydra.data.embedded import Embedded, texts, topics


def pieces(split):
    corpus = Embedded(split)
    return {(piece.name, piece.index): text for unit, piece in enumerate(corpus.pieces) for _, text in corpus.rows(unit)}


def test_pieces_of_a_text_are_the_text():
    found = pieces("train")
    name, path, _ = next(entry for entry in texts() if entry[0] == "argparse.py")
    parts = [text for (piece, _), text in sorted(found.items()) if piece == name]
    assert len(parts) > 5
    assert "".join(parts) == path.read_text()


def test_manual_is_part_of_it_whole():
    found = {**pieces("train"), **pieces("validation")}
    for topic, text in topics().items():
        assert "".join(found[key] for key in sorted(found) if key[0] == topic) == text


def test_no_text_is_in_both_splits():
    train, validation = ({name for name, _ in pieces(split)} for split in ("train", "validation"))
    assert not train & validation
    assert 0.02 < len(validation) / len(train | validation) < 0.1


def test_order_is_the_same_every_time():
    assert Embedded().pieces == Embedded().pieces


def test_enough_text_for_the_default_run():
    assert sum(map(len, pieces("train").values())) > 5_000_000
