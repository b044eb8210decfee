/* dist_plugin.c - finds and opens the plugin with MPI: a program that trains alone needs nothing of MPI to start. */
#include "train/dist_mpi.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The plugin's path when the caller names none. */
static void find_plugin(char out[2 * PATH_MAX])
{
    char folder[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", folder, sizeof folder);
    while (n > 0 && (n == (ssize_t)sizeof folder || folder[n - 1] != '/')) {
        n--;
    }
    (void)snprintf(out, 2 * PATH_MAX, "%.*s" TSR_DIST_PLUGIN, (int)(n > 0 ? n : 0), folder);
    if (access(out, F_OK) != 0) {
        (void)snprintf(out, 2 * PATH_MAX, "%s/" TSR_DIST_PLUGIN, TSR_PLUGIN_FOLDER);
    }
}

tsr_status tsr_dist_mpi_open(tsr_dist **out, const char *plugin, double timeout_s, tsr_err *err)
{
    char path[2 * PATH_MAX], why[512] = "";
    tsr_dist_mpi_fn *enter;
    *out = NULL;
    if (plugin != NULL) {
        (void)snprintf(path, sizeof path, "%s", plugin);
    } else {
        find_plugin(path);
    }
    if (access(path, F_OK) != 0) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED,
                 "%s: no such plugin (this build has no MPI; -Dmpi=enabled puts it in)", path);
    }
    void *so = dlopen(path,
                      RTLD_NOW | RTLD_GLOBAL); /* MPI opens plugins of its own, which look for its symbols */
    void *entry = so != NULL ? dlsym(so, TSR_DIST_MPI_ENTRY) : NULL;
    if (entry == NULL) {
        const char *told = dlerror();
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: cannot be loaded: %s", path,
                 told != NULL ? told : "no reason given");
    }
    memcpy(&enter, &entry, sizeof enter); /* a cast between data and functions is not C */
    tsr_status st = enter(out, TSR_VERSION, sizeof(tsr_dist), timeout_s, why, sizeof why);
    if (st != TSR_OK) {
        TSR_FAIL(err, st, "%s: %s", path, why);
    }
    return TSR_OK;
}
