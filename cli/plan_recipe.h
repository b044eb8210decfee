/* plan_recipe.h - tessera plan of a recipe. */
#ifndef TSR_CLI_PLAN_RECIPE_H
#define TSR_CLI_PLAN_RECIPE_H

#include "cli/cli.h"

/* By name: ends with .yaml or .yml, or nothing of this name is there and it could be an installed recipe. */
bool tsr_plan_is_recipe(const char *path);
/* Prints the plan of every stage of the recipe a->operands[0] as --json or text. */
TSR_NODISCARD tsr_status tsr_plan_recipe(tsr_cli *cli, const tsr_args *a, tsr_err *err);

#endif
