/* signals.c - the first signal asks, the second one ends. */
#include "cli/cli.h"

#include <signal.h>
#include <string.h>

static volatile sig_atomic_t first_signal;
static volatile int cancel;
static volatile sig_atomic_t usr1_saves, save_wanted;

static void on_signal(int number)
{
    if (number == SIGUSR1 && usr1_saves) {
        save_wanted = 1;
        return;
    }
    if (first_signal != 0) {
        (void)signal(number, SIG_DFL); /* delivered when this handler returns, and fatal then */
        (void)raise(number);
        return;
    }
    first_signal = number;
    cancel = 1;
}

void tsr_signals_install(void)
{
    static const int asking[] = { SIGINT, SIGTERM, SIGUSR1 };
    struct sigaction act, old;
    memset(&act, 0, sizeof act);
    act.sa_handler = on_signal;
    act.sa_flags = SA_RESTART;
    (void)sigemptyset(&act.sa_mask);
    for (size_t i = 0; i < sizeof asking / sizeof *asking; i++) {
        /* A background job of a shell without job control ignores SIGINT: that stays. */
        if (sigaction(asking[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN) {
            (void)sigaction(asking[i], &act, NULL);
        }
    }
    act.sa_handler = SIG_IGN;
    (void)sigaction(SIGPIPE, &act, NULL);
}

const volatile int *tsr_signals_flag(void)
{
    return &cancel;
}

int tsr_signals_seen(void)
{
    return first_signal;
}

void tsr_signals_usr1_saves(void)
{
    usr1_saves = 1;
}

bool tsr_signals_take_save(void)
{
    bool wanted = save_wanted != 0;
    save_wanted = 0;
    return wanted;
}
