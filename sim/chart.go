package sim

import (
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Chart is a picture of horizontal bars, each of parts that are stacked. Its SVG needs no other font,
// script or file, and has the same bytes for the same numbers.
type Chart struct {
	Title string
	Unit  string
	Parts []string // the legend; one name, or none, draws no legend
	Bars  []Bar
}

// Bar is a row of a chart. A row without values is a heading.
type Bar struct {
	Label  string
	Values []float64 // by part
	Text   string    // behind the bar; empty: the sum
}

// Measures of a chart in pixels.
const (
	chartWidth = 860
	rowHeight  = 22
	textHeight = 13
	margin     = 12
	letter     = 7.2 // about the width of one, to keep labels clear of the bars
)

var colours = []string{"#3b6ea5", "#d98c3f", "#7a9e4f", "#8c8c8c"}

// Breakdown is the chart of the parts of the runs' time.
func Breakdown(title string, results []Result) Chart {
	c := Chart{Title: title, Unit: "s", Parts: []string{"compute", "push and pull", "wait", "done"}}
	for _, r := range results {
		label := r.Model + ", " + r.Parking
		if r.Barrier == Global.String() {
			label += ", global barrier"
		}
		c.Bars = append(c.Bars, Bar{Label: label, Values: []float64{r.Compute * r.Seconds, r.Exchange * r.Seconds, r.Wait * r.Seconds, r.Idle * r.Seconds},
			Text: fmt.Sprintf("%.4g s, %d DPRs", r.Seconds, r.Delayed)})
	}
	return c
}

// SVG draws the chart.
func (c Chart) SVG() string {
	left, most, text := 0.0, 0.0, 0.0
	for _, b := range c.Bars {
		left, most = max(left, letters(b.Label)), max(most, b.sum())
		text = max(text, letters(b.text(c.Unit)))
	}
	left += 2 * margin
	width := max(100, chartWidth-left-text-3*margin)
	top := 3 * rowHeight
	if len(c.Parts) < 2 {
		top = 2 * rowHeight
	}
	height := top + rowHeight*len(c.Bars) + margin
	var s strings.Builder
	fmt.Fprintf(&s, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="%d">`+"\n", chartWidth, height, textHeight)
	fmt.Fprintf(&s, `<rect width="100%%" height="100%%" fill="white"/>`+"\n")
	label(&s, margin, rowHeight, "start", `font-weight="bold"`, c.Title)
	if len(c.Parts) > 1 {
		x := float64(margin)
		for k, name := range c.Parts {
			box(&s, x, float64(2*rowHeight)-11, 12, colours[k%len(colours)])
			label(&s, x+17, 2*rowHeight, "start", "", name)
			x += 17 + letters(name) + 2*margin
		}
	}
	for k, b := range c.Bars {
		y := float64(top + rowHeight*k)
		base := y + rowHeight - 7
		if len(b.Values) == 0 {
			label(&s, margin, base, "start", `font-style="italic"`, b.Label)
			continue
		}
		label(&s, left-margin, base, "end", "", b.Label)
		x := left
		for part, v := range b.Values {
			w := 0.0
			if most > 0 {
				w = width * v / most
			}
			box(&s, x, y+3, w, colours[part%len(colours)])
			x += w
		}
		label(&s, x+6, base, "start", "", b.text(c.Unit))
	}
	s.WriteString("</svg>\n")
	return s.String()
}

func (b Bar) sum() (sum float64) {
	for _, v := range b.Values {
		sum += v
	}
	return sum
}

func (b Bar) text(unit string) string {
	if b.Text != "" || len(b.Values) == 0 {
		return b.Text
	}
	return strings.TrimSpace(strconv.FormatFloat(b.sum(), 'g', 4, 64) + " " + unit)
}

func box(s *strings.Builder, x, y, width float64, colour string) {
	fmt.Fprintf(s, `<rect x="%s" y="%s" width="%s" height="14" fill="%s"/>`+"\n", pixels(x), pixels(y), pixels(width), colour)
}

func label(s *strings.Builder, x, y float64, anchor, style, text string) {
	fmt.Fprintf(s, `<text x="%s" y="%s" text-anchor="%s" %s>%s</text>`+"\n", pixels(x), pixels(y), anchor, style, html.EscapeString(text))
}

// letters is about the width of a text.
func letters(text string) float64 { return letter * float64(utf8.RuneCountInString(text)) }

func pixels(v float64) string { return strconv.FormatFloat(math.Round(10*v)/10, 'f', -1, 64) }
