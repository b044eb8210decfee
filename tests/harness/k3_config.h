/* k3_config.h - the hyper-parameters of the Kimi K3 and Kimi-Linear releases, as their config.json gives them. */
#ifndef TSR_TESTS_K3_CONFIG_H
#define TSR_TESTS_K3_CONFIG_H

/* malloc'ed text of a config.json with the released values. */
char *config_k3(void);
char *config_kimi_linear(void);

#endif
