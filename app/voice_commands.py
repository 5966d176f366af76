"""`launch.py voices`: the saved voices on the command line. Exit codes: 0 done, 2 the input is at fault."""

import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from app.voice_files import file_name
from app.voices import Voice, VoiceLibrary
from runtime import RequestError

VOICES_HELP = "folder of the saved voices (default: in your user's data folder; with --host a visit keeps its own)"


def add_voice_commands(commands: Any) -> None:
    """Adds `voices` with its own commands to the commands of the program."""
    voices = commands.add_parser(
        "voices",
        help="list, add, change, carry and remove saved voices",
        description="Voices that were saved under a name, for `say --voice` and the page.",
        argument_default=SUPPRESS,
    )
    voices.add_argument("--voices", type=Path, help=VOICES_HELP)
    actions = voices.add_subparsers(dest="action", title="commands", required=True)

    def action(name: str, tells: str, *positional: str) -> ArgumentParser:
        parser: ArgumentParser = actions.add_parser(name, help=tells, description=tells, argument_default=SUPPRESS)
        for each in positional:
            parser.add_argument(each, type=Path if each in ("recording", "archive") else str)
        parser.add_argument("--voices", type=Path, help=VOICES_HELP)
        return parser

    action("list", "names, lengths and descriptions")
    add = action("add", "save a voice", "name", "recording")
    add.add_argument("--consent", required=True, help='whose voice it is and that they agreed, as in "my own voice"')
    add.add_argument("--transcript", default="", help="the words of the recording; makes the likeness closer")
    add.add_argument("--description", default="")
    add.add_argument("--trim", action="store_true", default=False, help="keep the first 30 s of a longer recording")
    change = action("change", "correct transcript or description", "name")
    change.add_argument("--transcript", default=None)
    change.add_argument("--description", default=None)
    action("rename", "give a voice another name", "name", "new_name")
    action("remove", "delete a voice and its recording", "name")
    export = action("export", "write a voice as one zip file", "name")
    export.add_argument("archive", type=Path, nargs="?", default=None, help="default: the name of the voice")
    import_ = action("import", "take in an exported voice", "archive")
    import_.add_argument("--name", default=None, help="another name for it")
    for parser in (add, import_):
        parser.add_argument("--replace", action="store_true", default=False, help="in place of one with that name")


def run_voice_command(args: Namespace, library: VoiceLibrary | None) -> int:
    """Runs one of them. Raises RequestError for what cannot be done."""
    if library is None:
        raise RequestError("no voices are kept here; name their folder with --voices DIR")
    match args.action:
        case "list":
            for voice in library.voices():
                print(_line(voice))
            if not library.voices():
                tell(f"no voices in {library.folder}; `voices add NAME RECORDING --consent ...` saves one")
        case "add":
            voice = library.add(
                args.name,
                args.recording,
                consent=args.consent,
                transcript=args.transcript,
                description=args.description,
                trim=args.trim,
                replace=args.replace,
            )
            tell(f"saved {voice.name!r}, {voice.seconds:.1f} s")
        case "change":
            library.change(args.name, transcript=args.transcript, description=args.description)
        case "rename":
            library.rename(args.name, args.new_name)
        case "remove":
            library.remove(args.name)
        case "export":
            archive = args.archive or Path(file_name(library.find(args.name).name))
            library.export(args.name, archive)
            tell(f"wrote {archive}")
        case "import":
            tell(f"saved {library.import_(args.archive, args.name, replace=args.replace).name!r}")
    return 0


def tell(line: str) -> None:
    """To people, never into the stream of samples."""
    print(line, file=sys.stderr, flush=True)


def _line(voice: Voice) -> str:
    words = "" if voice.transcript else "no transcript"
    return "  ".join(filter(None, (voice.name, f"{voice.seconds:.1f} s", words, voice.description)))
