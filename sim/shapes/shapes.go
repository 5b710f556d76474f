// Package shapes is the tensors of common models, which placements and simulations are compared on.
package shapes

import "slices"

// Shape is the parameters of a model, in the order of its definition.
type Shape struct {
	Name     string `json:"model"`
	Elements []int  `json:"elements"` // of each tensor
}

// Parameters is the number of all elements.
func (s Shape) Parameters() (sum int) {
	for _, n := range s.Elements {
		sum += n
	}
	return sum
}

// All are the models, made from the definitions in the papers that introduce them.
func All() []Shape {
	return []Shape{
		{"alexnet", alexnet()}, {"resnet50", resnet(3, 4, 6, 3)}, {"resnet56", resnet56()}, {"resnet152", resnet(3, 8, 36, 3)}, {"googlenet", googlenet()},
		{"inception-v4", inceptionV4()}, {"vgg16", vgg16()}, {"bert-base", bertBase()},
	}
}

// Named finds a shape of All.
func Named(name string) (Shape, bool) {
	all := All()
	i := slices.IndexFunc(all, func(s Shape) bool { return s.Name == name })
	if i < 0 {
		return Shape{}, false
	}
	return all[i], true
}

// layers collects the tensors of a model.
type layers []int

func (l *layers) add(elements ...int) { *l = append(*l, elements...) }

// biased is a linear layer, or a convolution of in/area channels, with a bias.
func (l *layers) biased(in, out int) { l.add(in*out, out) }

// conv is a convolution with batch normalisation and no bias.
func (l *layers) conv(height, width, in, out int) { l.add(height*width*in*out, out, out) }

// chain is convolutions behind each other, each {height, width, channels}.
func (l *layers) chain(in int, convs ...[3]int) {
	for _, c := range convs {
		l.conv(c[0], c[1], in, c[2])
		in = c[2]
	}
}

// resnet is a residual network of bottlenecks for ImageNet (He et al. 2015, table 1).
func resnet(blocks ...int) []int {
	var l layers
	l.conv(7, 7, 3, 64)
	in := 64
	for stage, n := range blocks {
		width := 64 << stage
		for k := range n {
			l.chain(in, [3]int{1, 1, width}, [3]int{3, 3, width}, [3]int{1, 1, 4 * width})
			if k == 0 {
				l.conv(1, 1, in, 4*width)
			}
			in = 4 * width
		}
	}
	l.biased(in, 1000)
	return l
}

// alexnet is that of Krizhevsky et al. 2012 on one GPU, without the groups of its convolutions (Krizhevsky 2014).
func alexnet() []int {
	var l layers
	l.biased(11*11*3, 64)
	l.biased(5*5*64, 192)
	l.biased(3*3*192, 384)
	l.biased(3*3*384, 256)
	l.biased(3*3*256, 256)
	l.biased(6*6*256, 4096)
	l.biased(4096, 4096)
	l.biased(4096, 1000)
	return l
}

// resnet56 is the one for CIFAR-10 (section 4.2), with shortcuts that have no parameters.
func resnet56() []int {
	var l layers
	l.conv(3, 3, 3, 16)
	in := 16
	for _, width := range []int{16, 32, 64} {
		for range 9 {
			l.chain(in, [3]int{3, 3, width}, [3]int{3, 3, width})
			in = width
		}
	}
	l.biased(in, 10)
	return l
}

// googlenet is Inception-v1 (Szegedy et al. 2014, table 1), without the auxiliary classifiers.
func googlenet() []int {
	var l layers
	l.biased(7*7*3, 64)
	l.biased(64, 64)
	l.biased(3*3*64, 192)
	in := 192
	for _, m := range [][6]int{ // 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, behind the pool
		{64, 96, 128, 16, 32, 32}, {128, 128, 192, 32, 96, 64}, {192, 96, 208, 16, 48, 64}, {160, 112, 224, 24, 64, 64}, {128, 128, 256, 24, 64, 64},
		{112, 144, 288, 32, 64, 64}, {256, 160, 320, 32, 128, 128}, {256, 160, 320, 32, 128, 128}, {384, 192, 384, 48, 128, 128},
	} {
		l.biased(in, m[0])
		l.biased(in, m[1])
		l.biased(9*m[1], m[2])
		l.biased(in, m[3])
		l.biased(25*m[3], m[4])
		l.biased(in, m[5])
		in = m[0] + m[2] + m[4] + m[5]
	}
	l.biased(in, 1000)
	return l
}

// inceptionV4 is that of Szegedy et al. 2016, figures 3 to 9.
func inceptionV4() []int {
	var l layers
	l.chain(3, [3]int{3, 3, 32}, [3]int{3, 3, 32}, [3]int{3, 3, 64}, [3]int{3, 3, 96})
	l.chain(160, [3]int{1, 1, 64}, [3]int{3, 3, 96})
	l.chain(160, [3]int{1, 1, 64}, [3]int{1, 7, 64}, [3]int{7, 1, 64}, [3]int{3, 3, 96})
	l.chain(192, [3]int{3, 3, 192})
	for range 4 { // Inception-A
		l.chain(384, [3]int{1, 1, 96})
		l.chain(384, [3]int{1, 1, 64}, [3]int{3, 3, 96})
		l.chain(384, [3]int{1, 1, 64}, [3]int{3, 3, 96}, [3]int{3, 3, 96})
		l.chain(384, [3]int{1, 1, 96})
	}
	l.chain(384, [3]int{3, 3, 384}) // Reduction-A
	l.chain(384, [3]int{1, 1, 192}, [3]int{3, 3, 224}, [3]int{3, 3, 256})
	for range 7 { // Inception-B
		l.chain(1024, [3]int{1, 1, 384})
		l.chain(1024, [3]int{1, 1, 192}, [3]int{1, 7, 224}, [3]int{7, 1, 256})
		l.chain(1024, [3]int{1, 1, 192}, [3]int{7, 1, 192}, [3]int{1, 7, 224}, [3]int{7, 1, 224}, [3]int{1, 7, 256})
		l.chain(1024, [3]int{1, 1, 128})
	}
	l.chain(1024, [3]int{1, 1, 192}, [3]int{3, 3, 192}) // Reduction-B
	l.chain(1024, [3]int{1, 1, 256}, [3]int{1, 7, 256}, [3]int{7, 1, 320}, [3]int{3, 3, 320})
	for range 3 { // Inception-C
		l.chain(1536, [3]int{1, 1, 256})
		l.conv(1, 1, 1536, 384)
		l.conv(1, 3, 384, 256)
		l.conv(3, 1, 384, 256)
		l.chain(1536, [3]int{1, 1, 384}, [3]int{3, 1, 448}, [3]int{1, 3, 512})
		l.conv(1, 3, 512, 256)
		l.conv(3, 1, 512, 256)
		l.chain(1536, [3]int{1, 1, 256})
	}
	l.biased(1536, 1000)
	return l
}

// vgg16 is configuration D (Simonyan and Zisserman 2014, table 1).
func vgg16() []int {
	var l layers
	in := 3
	for _, out := range []int{64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512} {
		l.biased(9*in, out)
		in = out
	}
	l.biased(512*7*7, 4096)
	l.biased(4096, 4096)
	l.biased(4096, 1000)
	return l
}

// bertBase is the encoder with its pooler (Devlin et al. 2018, section 3), 30,522 word pieces.
func bertBase() []int {
	const hidden, inner = 768, 3072
	l := layers{30522 * hidden, 512 * hidden, 2 * hidden, hidden, hidden}
	for range 12 {
		for range 4 { // query, key, value, output
			l.biased(hidden, hidden)
		}
		l.add(hidden, hidden)
		l.biased(hidden, inner)
		l.biased(inner, hidden)
		l.add(hidden, hidden)
	}
	l.biased(hidden, hidden)
	return slices.Clip(l)
}
