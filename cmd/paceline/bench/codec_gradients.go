package bench

import (
	"math"
	"math/rand/v2"
)

// gradients are the test data of codecs, by name. All come from fixed seeds.
type gradients struct {
	name string
	x    []float32
}

// newGradients makes three tensors: of normal numbers; heavy-tailed, of Student's t with 3 degrees of
// freedom; and a gradient that training computed (see softmaxGradient).
func newGradients(n int) []gradients {
	rng := rand.New(rand.NewPCG(1, 2))
	normal, heavy := make([]float32, n), make([]float32, n)
	for i := range n {
		normal[i] = float32(rng.NormFloat64())
		a, b, c := rng.NormFloat64(), rng.NormFloat64(), rng.NormFloat64()
		heavy[i] = float32(rng.NormFloat64() / math.Sqrt((a*a+b*b+c*c)/3))
	}
	return []gradients{{"normal", normal}, {"heavy", heavy}, {"real", softmaxGradient(rng)}}
}

// The softmax regression: texts of words with Zipf's frequencies, classified by topic.
const (
	topics   = 64
	words    = 4096
	textSize = 100 // words
	batch    = 64  // texts
	steps    = 20  // of plain descent before the gradient in use
)

// softmaxGradient is the gradient of the weights, words × topics of them, of a softmax regression on bags of words
// in the middle of its training. Each topic prefers some words. Rows of frequent words are large, those
// of words that the batch does not hold are zero, as in the embeddings of language models.
func softmaxGradient(rng *rand.Rand) []float32 {
	zipf := rand.NewZipf(rng, 1.1, 4, words-1)
	weights, g := make([]float64, words*topics), make([]float64, words*topics)
	for step := range steps + 1 {
		clear(g)
		for range batch {
			topic := rng.IntN(topics)
			text := make([]int, textSize)
			for i := range text {
				text[i] = int(zipf.Uint64())
				if rng.IntN(4) == 0 { // a word of the topic
					text[i] = (text[i]*topics + topic) % words
				}
			}
			addTextGradient(g, weights, text, topic)
		}
		if step == steps {
			break
		}
		for i := range g {
			weights[i] -= 0.5 * g[i]
		}
	}
	x := make([]float32, len(g))
	for i, v := range g {
		x[i] = float32(v)
	}
	return x
}

// addTextGradient adds a text's share of the gradient of the mean cross-entropy.
func addTextGradient(g, weights []float64, text []int, topic int) {
	var p [topics]float64
	for _, w := range text {
		for t := range p {
			p[t] += weights[w*topics+t] / textSize
		}
	}
	sum := 0.0
	for t := range p {
		p[t] = math.Exp(p[t])
		sum += p[t]
	}
	for t := range p {
		p[t] /= sum
	}
	p[topic]--
	for _, w := range text {
		for t := range p {
			g[w*topics+t] += p[t] / textSize / batch
		}
	}
}
