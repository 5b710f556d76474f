package shapes

import "testing"

// Published numbers of parameters, and of tensors in the implementations that have the same layers.
func TestShapesHaveThePublishedParameters(t *testing.T) {
	want := map[string][2]int{
		"alexnet": {61_100_840, 16}, "resnet50": {25_557_032, 161}, "resnet56": {853_018, 167}, "resnet152": {60_192_808, 467}, "googlenet": {6_998_552, 116},
		"inception-v4": {42_679_816, 449}, "vgg16": {138_357_544, 32}, "bert-base": {109_482_240, 199},
	}
	for _, s := range All() {
		if got := [2]int{s.Parameters(), len(s.Elements)}; got != want[s.Name] {
			t.Errorf("%s has %d parameters in %d tensors, published are %v", s.Name, got[0], got[1], want[s.Name])
		}
	}
}
