//! The thread's own work: plan, forward, sample, commit, without the GIL.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use fastserve_base::{Nanos, StepError, StepId};
use fastserve_cpu as cpu;
use fastserve_engine::{PlanLayout, PlanSizes, PlanView, Results, StepOutputs};
use fastserve_sched::plan::TABLE_EDIT_WORDS;

use super::outbox::{End, News, Outbox};
use crate::core::SharedCore;
use crate::cpu::bug_text;
use crate::cpu::sampling::apply_events;
use crate::guard::unguarded;
use crate::outputs::Spares;

/// Logits beyond this are given back after their step.
const KEPT_LOGITS: usize = (64 << 20) / size_of::<f32>();

/// The caller's clock, read without the caller.
pub(super) struct Clock {
    began: Instant,
    /// What it showed then.
    began_at: Nanos,
}

impl Clock {
    /// A clock that shows `now` now.
    pub(super) fn new(now: Nanos) -> Self {
        Self { began: Instant::now(), began_at: now }
    }

    fn now(&self) -> Nanos {
        self.began_at + self.began.elapsed().as_nanos() as Nanos
    }
}

/// Keys and values in memory of Python's.
pub(super) struct Cache {
    data: *mut u8,
    num_layers: usize,
    layout: cpu::KvLayout,
}

// SAFETY: the memory is the thread's alone from `Cache::new` on.
unsafe impl Send for Cache {}

impl Cache {
    /// # Safety
    ///
    /// As for [`cpu::KvCache::from_raw`], for as long as this lives.
    pub(super) unsafe fn new(data: *mut u8, num_layers: usize, layout: cpu::KvLayout) -> Self {
        Self { data, num_layers, layout }
    }
}

/// What computes a step.
pub(super) struct Model {
    pub(super) decoder: Arc<cpu::Decoder>,
    pub(super) pool: Arc<cpu::Pool>,
    pub(super) cache: Cache,
    pub(super) cos_sin: cpu::Matrix<'static>,
}

/// A step that is planned and not run.
struct Planned {
    step: StepId,
    num_outputs: usize,
    /// Which of the arenas its plan is in.
    arena: usize,
}

/// Everything that the thread owns.
pub(super) struct Stepper {
    core: Arc<SharedCore>,
    outbox: Arc<Outbox>,
    clock: Clock,
    model: Model,
    sampler: cpu::Sampler,
    layout: PlanLayout,
    /// One more than steps may be in flight, taken in turn.
    arenas: Vec<Vec<i32>>,
    spare_arena: usize,
    planned: VecDeque<Planned>,
    /// A copy of the block tables that follows the edits of the plans that are run: the core's own are
    /// those of the step planned last.
    tables: Vec<i32>,
    max_blocks: usize,
    logits: Vec<f32>,
    outputs: Arc<Spares<StepOutputs>>,
    samples: Arc<Spares<cpu::Samples>>,
}

impl Stepper {
    /// Get ready to step `core`, whose block tables have `max_blocks` columns.
    pub(super) fn new(
        core: Arc<SharedCore>,
        outbox: Arc<Outbox>,
        clock: Clock,
        model: Model,
        max_blocks: usize,
        (outputs, samples): (Arc<Spares<StepOutputs>>, Arc<Spares<cpu::Samples>>),
    ) -> Self {
        let (config, layout) = {
            let core = core.lock();
            (core.config().clone(), core.layout().clone())
        };
        let num_slots = config.max_num_seqs as usize;
        let num_arenas = config.max_num_steps_in_flight as usize + 1;
        let vocab_size = model.decoder.model().lm_head.num_rows();
        Self {
            core,
            outbox,
            clock,
            sampler: cpu::Sampler::new(num_slots, vocab_size),
            model,
            arenas: (0..num_arenas).map(|_| vec![0; layout.words]).collect(),
            layout,
            spare_arena: 0,
            planned: VecDeque::with_capacity(num_arenas),
            tables: vec![0; num_slots * max_blocks],
            max_blocks,
            logits: Vec::new(),
            outputs,
            samples,
        }
    }

    /// Life of the thread.
    pub(super) fn run(mut self) {
        let health = self.core.health.clone();
        let end = match health.caught(|| self.step_until_stopped()) {
            Some(Ok(())) => End::Stopped,
            Some(Err(error)) => End::Failed(error.to_string()),
            None => End::Panicked,
        };
        self.outbox.end(end);
    }

    /// An error is a bug: of ours, or of somebody who closed the core under us.
    fn step_until_stopped(&mut self) -> Result<(), StepError> {
        while self.outbox.begin() {
            self.plan_ahead()?;
            if let Some(planned) = self.planned.pop_front() {
                self.step(&planned)?;
            } else if !self.say_rest() {
                self.outbox.park();
            }
        }
        if let Some(planned) = self.planned.pop_front() {
            self.fail(&planned, None)?;
        }
        Ok(())
    }

    /// Plan as many steps as may be in flight.
    fn plan_ahead(&mut self) -> Result<(), StepError> {
        while self.planned.len() + 1 < self.arenas.len() {
            let arena = self.spare_arena;
            let now = self.clock.now();
            let sizes: PlanSizes = self.core.lock().plan(now, &mut self.arenas[arena])?;
            if !sizes.is_step() {
                break;
            }
            let (step, num_outputs) = (sizes.step, sizes.num_outputs as usize);
            self.planned.push_back(Planned { step, num_outputs, arena });
            self.spare_arena = (arena + 1) % self.arenas.len();
        }
        Ok(())
    }

    fn step(&mut self, planned: &Planned) -> Result<(), StepError> {
        let mut samples = self.samples.take();
        let compute = AssertUnwindSafe(|| self.compute(planned, &mut samples));
        let computed =
            unguarded(|| catch_unwind(compute)).unwrap_or_else(|panic| Err(bug_text(&*panic)));
        if let Err(failure) = computed {
            self.samples.give(samples);
            return self.fail(planned, Some(failure));
        }
        let mut outputs = self.outputs.take();
        let results = Results { counts: &samples.counts, tokens: &samples.tokens };
        let at = self.clock.now();
        {
            let mut core = self.core.lock();
            core.commit(planned.step, at, results)?;
            core.take_outputs(&mut outputs);
        }
        self.outbox.push(News { step: Some(planned.step), at, outputs, samples, failure: None });
        Ok(())
    }

    /// `planned` is the oldest step in flight and failed, and those planned on top of it with it.
    fn fail(&mut self, planned: &Planned, failure: Option<String>) -> Result<(), StepError> {
        self.planned.clear();
        let mut outputs = self.outputs.take();
        let at = self.clock.now();
        {
            let mut core = self.core.lock();
            core.fail(planned.step, at)?;
            core.take_outputs(&mut outputs);
        }
        let samples = cpu::Samples::default();
        self.outbox.push(News { step: Some(planned.step), at, outputs, samples, failure });
        Ok(())
    }

    /// Say what there is to say between steps. False: nothing.
    fn say_rest(&mut self) -> bool {
        let mut outputs = self.outputs.take();
        self.core.lock().take_outputs(&mut outputs);
        if outputs.is_empty() {
            self.outputs.give(outputs);
            return false;
        }
        let (at, samples) = (self.clock.now(), cpu::Samples::default());
        self.outbox.push(News { step: None, at, outputs, samples, failure: None });
        true
    }

    /// Forward and sample. An error says what failed.
    fn compute(&mut self, planned: &Planned, samples: &mut cpu::Samples) -> Result<(), String> {
        let plan = PlanView::new(&self.layout, &self.arenas[planned.arena]);
        if !plan.copies_out().is_empty() || !plan.copies_in().is_empty() {
            let text = "the plan copies blocks to or from another tier; there is none here";
            return Err(text.to_owned());
        }
        for edit in plan.table_edits().chunks_exact(TABLE_EDIT_WORDS) {
            self.tables[edit[0] as usize * self.max_blocks + edit[1] as usize] = edit[2];
        }
        apply_events(&mut self.sampler, plan.slot_events()).map_err(|error| error.to_string())?;
        let Model { decoder, pool, cache, cos_sin } = &self.model;
        let vocab_size = decoder.model().lm_head.num_rows();
        let num_logits = planned.num_outputs * vocab_size;
        if self.logits.len() < num_logits {
            self.logits.resize(num_logits, 0.0);
        }
        let mut logits = cpu::MatrixMut::f32(&mut self.logits[..num_logits], vocab_size);
        // SAFETY: what `Cache::new` was promised, and this is the only view of it.
        let mut kv = unsafe { cpu::KvCache::from_raw(cache.data, cache.num_layers, cache.layout) };
        let step = cpu::Step {
            token_ids: plan.token_ids(),
            last_samples: self.sampler.last_samples(),
            positions: plan.positions(),
            slot_mapping: plan.slot_mapping(),
            row_slots: plan.row_slots(),
            query_indptr: plan.query_indptr(),
            seq_lens: plan.seq_lens(),
            num_shared_blocks: plan.num_shared_blocks(),
            block_tables: &self.tables,
            max_blocks: self.max_blocks,
            out_rows: plan.out_rows(),
            copies: plan.copies(),
            cos_sin: *cos_sin,
        };
        let outputs = cpu::Outputs {
            positions: plan.positions(),
            out_rows: plan.out_rows(),
            out_slots: plan.out_slots(),
            out_kinds: plan.out_kinds(),
        };
        let computed = decoder
            .forward(pool, &step, &mut kv, &mut logits)
            .and_then(|()| self.sampler.sample(pool, logits.as_matrix(), &outputs, samples));
        if self.logits.len() > KEPT_LOGITS {
            self.logits = Vec::new();
        }
        computed.map_err(|error| error.to_string())
    }
}
