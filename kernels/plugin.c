/* plugin.c - finds and opens the plugin with the backend "cuda". A program needs nothing of CUDA to start; what the
 * plugin needs (the driver, a GPU) it looks for itself. */
#include "kernels/backend_priv.h"

#include <stdio.h>

static const char *chosen;

void tsr_backend_set_plugin(const char *path)
{
    chosen = path;
}

#ifdef TSR_HAVE_CUDA
#include <dlfcn.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

/* The folder of the running program, with its last slash. False: unknown, or too long. */
static bool program_folder(char out[PATH_MAX])
{
    ssize_t n = readlink("/proc/self/exe", out, PATH_MAX);
    if (n <= 0 || n == PATH_MAX) {
        return false;
    }
    while (n > 0 && out[n - 1] != '/') {
        n--;
    }
    out[n] = '\0';
    return n > 0;
}

/* Always whole paths: the linker's own search is not for us. NULL: no such file, or dlerror tells. */
static void *open_at(const char *folder, const char *name, bool *there)
{
    char path[2 * PATH_MAX];
    int n = snprintf(path, sizeof path, "%s%s", folder, name);
    *there = n > 0 && (size_t)n < sizeof path && access(path, F_OK) == 0;
    return *there ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
}

/* Plugins stay open: CUDA cannot be unloaded. */
static void *open_plugin(tsr_err *err)
{
    char folder[PATH_MAX];
    void *so = NULL;
    bool there = false;
    if (chosen != NULL) {
        so = open_at("", chosen, &there);
    } else {
        if (program_folder(folder)) {
            so = open_at(folder, TSR_PLUGIN_NAME, &there);
        }
        if (!there) {
            so = open_at(TSR_PLUGIN_FOLDER "/", TSR_PLUGIN_NAME, &there);
        }
    }
    if (so == NULL && there) {
        const char *why = dlerror();
        TSR_IGNORE(TSR_ERR(err, TSR_E_UNSUPPORTED, "backend cuda: the plugin cannot be loaded: %s",
                           why != NULL ? why : "no reason given"));
    } else if (so == NULL) {
        TSR_IGNORE(TSR_ERR(err, TSR_E_UNSUPPORTED, "backend cuda: %s: no such plugin (%s)",
                           chosen != NULL ? chosen : TSR_PLUGIN_NAME,
                           chosen != NULL ? "check TESSERA_CUDA_PLUGIN"
                                          : "install it in " TSR_PLUGIN_FOLDER " or beside the program"));
    }
    return so;
}

tsr_status tsr_plugin_open(tsr_backend **out, tsr_err *err)
{
    *out = NULL;
    void *so = open_plugin(err);
    if (so == NULL) {
        return TSR_E_UNSUPPORTED; /* err says why */
    }
    __typeof__(&tsr_cuda_open) enter;
    void *entry = dlsym(so, TSR_CUDA_ENTRY);
    if (entry == NULL) {
        TSR_FAIL(err, TSR_E_UNSUPPORTED,
                 "backend cuda: %s: not a plugin of Tessera (has no " TSR_CUDA_ENTRY ")",
                 chosen != NULL ? chosen : TSR_PLUGIN_NAME);
    }
    memcpy(&enter, &entry, sizeof enter); /* a cast between data and functions is not C */
    char why[512] = "";
    tsr_status st = enter(out, TSR_VERSION, tsr_plugin_layout(), why, sizeof why);
    if (st != TSR_OK) {
        TSR_FAIL(err, st, "backend cuda: %s", why);
    }
    return TSR_OK;
}
#else
tsr_status tsr_plugin_open(tsr_backend **out, tsr_err *err)
{
    *out = NULL;
    TSR_FAIL(err, TSR_E_UNSUPPORTED,
             "backend cuda: not in this build (-Dcuda=enabled, which needs nvcc, puts it in)");
}
#endif
