"""test_plan_recipe.py - tessera plan of recipes: names and files, options, JSON, refusals."""
import os

from tsrtest import Case, main, run

RECIPES = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), 'recipes')
os.environ['TESSERA_RECIPES'] = RECIPES


class Recipes(Case):
    def test_kimi_k3(self):
        r = self.ok('plan', 'k3-2.8t', '--json').json()
        self.assertAlmostEqual(r['params_total'] / 2.8e12, 1, delta=0.02)
        self.assertAlmostEqual(r['params_active'] / 104e9, 1, delta=0.02)
        self.assertEqual([s['context'] for s in r['stages']], [8192, 65536, 262144, 1048576])
        self.assertEqual(r['ranks'], 64 * 8 * 8)
        for s in r['stages']:
            self.assertEqual(s['parameters'], 4 * s['params'])
            self.assertEqual(s['total'], s['parameters'] + s['gradients'] + s['optimizer'] + s['activations_recompute'])
            self.assertLess(s['activations_recompute'], s['activations'])
            self.assertGreater(s['expert_all_to_all'], 0)

    def test_options_take_the_place_of_the_recipe(self):
        one = self.ok('plan', 'tiny', '--json').json()
        r = self.ok('plan', 'tiny', '--ep', '2', '--dp', '2', '--cp', '2', '--pp', '2', '--json').json()
        self.assertEqual((one['ranks'], r['ranks']), (1, 16))
        self.assertEqual([r[k] for k in ('ep', 'dp', 'cp', 'pp')], [2, 2, 2, 2])
        self.assertEqual(one['stages'][0]['traffic'], 0)
        for a, b in zip(one['stages'], r['stages']):
            self.assertLess(b['total'], a['total'])
            for key in ('expert_all_to_all', 'reduce_scatter', 'all_gather', 'pipeline', 'cp_states'):
                self.assertGreater(b[key], 0, key)

    def test_text(self):
        text = self.ok('plan', os.path.join(RECIPES, 'small.yaml'), '--ep', '4').out
        text = text.decode() if isinstance(text, bytes) else text
        for words in ('ranks                        4 (ep 4, dp 1, cp 1, pp 1)', 'stage long: context 16384, 200 steps', 'optimizer state',
                      'activations, recomputed', 'experts, all to all'):
            self.assertIn(words, text)

    def test_refusals(self):
        self.assertEqual(run('plan', 'tiny', '--ep', '3').code, 6)
        self.assertEqual(run('plan', 'tiny', '--pp', '5').code, 6)
        self.assertEqual(run('plan', 'tiny', '--ranks', '2').code, 2)
        self.assertEqual(run('plan', os.path.join(RECIPES, '..', 'tests', 'data', 'tiny-mxfp4', 'config.json'), '--ep', '2').code, 2)
        self.assertEqual(run('plan', 'no-such-recipe').code, 4)
        self.assertEqual(run('plan', 'no-such-recipe.yaml').code, 4)
        bad = os.path.join(self.dir, 'bad.yaml')
        with open(bad, 'w', encoding='utf-8') as f:
            f.write('modle: {}\n')
        self.assertEqual(run('plan', bad).code, 3)


if __name__ == '__main__':
    main()
