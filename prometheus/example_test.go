package prometheus_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	sfprometheus "github.com/singlefill/singlefill/prometheus"
)

func Example() {
	server, err := miniredis.Run() // in production: redis.NewClient with the address of your Redis
	if err != nil {
		panic(err)
	}
	defer server.Close()
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer rdb.Close()

	users, err := singlefill.New[string](rdb, "users", 5*time.Minute, nil)
	if err != nil {
		panic(err)
	}
	defer users.Close()
	registry := prometheus.NewRegistry() // or prometheus.DefaultRegisterer
	registry.MustRegister(sfprometheus.NewCollector(users))
	metrics := promhttp.HandlerFor(registry, promhttp.HandlerOpts{})

	for range 3 {
		if _, err := users.GetOrLoad(context.Background(), "42", func(context.Context, string) (string, error) { return "Ada", nil }); err != nil {
			panic(err)
		}
	}
	w := httptest.NewRecorder()
	metrics.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for line := range strings.Lines(w.Body.String()) {
		if strings.HasPrefix(line, "singlefill_gets_total") && strings.Contains(line, `"redis"`) {
			fmt.Print(line)
		}
	}
	// Output:
	// singlefill_gets_total{cache="users",layer="redis",result="hit"} 2
	// singlefill_gets_total{cache="users",layer="redis",result="miss"} 1
	// singlefill_gets_total{cache="users",layer="redis",result="stale"} 0
}
