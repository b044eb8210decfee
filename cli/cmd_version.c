/* cmd_version.c - tessera version: what this program is and which formats it knows. */
#include "cli/cli.h"
#include "cli/out.h"
#include "format/layout.h"

static const char *const synopsis[] = { "[--json]", NULL };
static const char *const description[] = {
    "Prints the version of the program, the version of the checkpoint format it writes, and, with --verbose "
    "or --json, "
    "the formats and name tables it reads.",
    NULL,
};
static const tsr_opt options[] = { TSR_OPT_END };
static const tsr_pair examples[] = { { "tessera version --json", "For scripts and bug reports." }, { 0 } };

static tsr_status print_json(tsr_err *err)
{
    json_t *o = json_object(), *formats = json_array(), *arches = json_array();
    for (size_t i = 0; tsr_source_formats[i] != NULL; i++) {
        tsr_json_append(&formats, tsr_json_text(tsr_source_formats[i]->name));
    }
    for (size_t i = 0; tsr_layouts[i] != NULL; i++) {
        tsr_json_append(&arches, tsr_json_text(tsr_layouts[i]->arch));
    }
    tsr_json_set(&o, "version", tsr_json_text(TSR_VERSION));
    tsr_json_set(&o, "format_version", json_integer(TSR_FORMAT_VERSION));
    tsr_json_set(&o, "formats", formats);
    tsr_json_set(&o, "arches", arches);
    return tsr_json_print(o, false, err);
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    (void)a;
    if (cli->json) {
        return print_json(err);
    }
    (void)printf("tessera %s (checkpoint format %d)\n", TSR_VERSION, TSR_FORMAT_VERSION);
    for (size_t i = 0; cli->verbose && tsr_source_formats[i] != NULL; i++) {
        (void)printf("format %-12s %s\n", tsr_source_formats[i]->name, tsr_source_formats[i]->what);
    }
    for (size_t i = 0; cli->verbose && tsr_layouts[i] != NULL; i++) {
        (void)printf("arch   %-12s %s\n", tsr_layouts[i]->arch, tsr_layouts[i]->what);
    }
    return TSR_OK;
}

const tsr_cmd tsr_cmd_version = { .name = "version",
                                  .what = "Print the version",
                                  .synopsis = synopsis,
                                  .description = description,
                                  .options = options,
                                  .examples = examples,
                                  .operand_min = 0,
                                  .operand_max = 0,
                                  .run = run };
